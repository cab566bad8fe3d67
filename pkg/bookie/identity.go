package bookie

import (
	"context"
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"path"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/ledgerstore"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Cookies are the identities that the cluster knows; [*meta.Store] keeps them.
type Cookies interface {
	GetCookie(ctx context.Context, id string) (meta.Cookie, error)
	CreateCookie(ctx context.Context, c meta.Cookie) error
	CountStart(ctx context.Context, id string, u entry.StorageUUID, n uint64) error
}

// The names in a data directory.
const (
	// cookieName is the cookie of a disk that is in use.
	cookieName = "COOKIE"
	// cookieNewName is the cookie of a disk whose store was never open.
	cookieNewName = "COOKIE.new"
	cookieTmpName = "COOKIE.tmp"
	lockName      = "LOCK"
	probeName     = "probe"
	storeDir      = "ledgers"
)

// IdentityError is a refusal to start, with what to do about it.
type IdentityError struct {
	// Problem says what does not fit, Advice what an operator can do.
	Problem, Advice string
}

// Error joins both.
func (e *IdentityError) Error() string { return "refusing to start: " + e.Problem + "; " + e.Advice }

// disk is a data directory, as far as identity goes.
type disk struct {
	fs  vfs.FS
	dir string
}

// Identify establishes who the disk at dir is, for bookie id of a cluster. Only an empty directory whose bookie id
// has no cookie in the metadata becomes a new identity; anything else that does not fit is an [*IdentityError]. A new
// identity must be confirmed once the store has been opened, and before anything is served; its disk may be empty
// until then. Of one that was confirmed before, confirm is nil, and something of the store's log is there.
//
// A new identity passes three durable steps: COOKIE.new on the disk, the record in the metadata, and after the store
// was created COOKIE in its place. So a crash between any two can be told from a disk that lost its data: a disk with
// COOKIE has a store and a record, always.
func Identify(ctx context.Context, fs vfs.FS, dir, id string, cluster entry.UUID, cookies Cookies) (who Identity, confirm func() error, err error) {
	return disk{fs: fs, dir: dir}.identify(ctx, id, cluster, cookies, meta.NewUUID)
}

// identify is [Identify], with the source of new identities.
func (d disk) identify(ctx context.Context, id string, cluster entry.UUID, cookies Cookies, mint func() entry.StorageUUID) (who Identity, confirm func() error, err error) {
	fs, dir := d.fs, d.dir
	names, err := fs.List(dir)
	if err != nil {
		return Identity{}, nil, fmt.Errorf("list data directory: %w", err)
	}
	has := make(map[string]bool)
	others := ""
	for _, n := range names {
		has[n] = true
		switch n {
		case cookieName, cookieNewName, cookieTmpName, lockName, probeName, markName, markTmpName, startName, startName + ".tmp", "lost+found":
		default:
			others = n
		}
	}
	record, err := cookies.GetCookie(ctx, id)
	recorded := err == nil
	if err != nil && !errors.Is(err, meta.ErrNotFound) {
		return Identity{}, nil, fmt.Errorf("read the bookie's record: %w", err)
	}
	wanted := Identity{Cluster: cluster, ID: id}
	switch {
	case has[cookieName]:
		c, err := d.load(cookieName, wanted)
		if err != nil {
			return Identity{}, nil, err
		}
		if err := d.agrees(c, record, recorded); err != nil {
			return Identity{}, nil, err
		}
		switch holds, err := ledgerstore.Holds(fs, path.Join(dir, storeDir)); {
		case err != nil:
			return Identity{}, nil, err
		case !holds:
			return Identity{}, nil, &IdentityError{
				Problem: fmt.Sprintf("%s has the cookie of bookie %q and none of its data: neither a manifest nor a segment is in %s", dir, id, path.Join(dir, storeDir)),
				Advice:  "bring that directory back as it was when the bookie last ran; if it is lost, " + lostAdvice,
			}
		}
		return c.Identity, nil, nil
	case has[cookieNewName]:
		c, err := d.load(cookieNewName, wanted)
		if err != nil {
			return Identity{}, nil, err
		}
		if others != "" && others != storeDir {
			return Identity{}, nil, d.notEmpty(others)
		}
		if recorded {
			if err := d.agrees(c, record, true); err != nil {
				return Identity{}, nil, err
			}
		} else if err := d.record(ctx, cookies, c); err != nil {
			return Identity{}, nil, err
		}
		return c.Identity, d.confirm, nil
	case others != "":
		return Identity{}, nil, d.notEmpty(others)
	case recorded:
		return Identity{}, nil, &IdentityError{
			Problem: fmt.Sprintf("bookie %q has stored data under identity %s, and %s is empty", id, record.UUID, dir),
			Advice:  "mount the disk that holds them; if it is lost, " + lostAdvice,
		}
	}
	c := Cookie{Identity: Identity{Cluster: cluster, Storage: mint(), ID: id}, Created: time.Now()}
	if err := d.create(c); err != nil {
		return Identity{}, nil, err
	}
	if err := d.record(ctx, cookies, c); err != nil {
		return Identity{}, nil, err
	}
	return c.Identity, d.confirm, nil
}

const lostAdvice = "start an empty bookie under another --bookie-id: an empty disk must never answer for what the lost one has acknowledged"

func (d disk) notEmpty(name string) error {
	return &IdentityError{
		Problem: fmt.Sprintf("%s has no cookie and is not empty: there is %q", d.dir, name),
		Advice:  "choose an empty --data-dir, or restore the COOKIE file that belongs to this data",
	}
}

// load reads a cookie and checks that it is that of the bookie wanted.
func (d disk) load(name string, wanted Identity) (Cookie, error) {
	file := path.Join(d.dir, name)
	b, err := readAll(d.fs, file)
	if err != nil {
		return Cookie{}, fmt.Errorf("read cookie: %w", err)
	}
	c, err := decodeCookie(b)
	switch {
	case err != nil:
		return Cookie{}, &IdentityError{
			Problem: fmt.Sprintf("%s: %v", file, err),
			Advice:  "restore the file from a copy, or check the disk; do not delete it, the data beside it would lose their identity",
		}
	case c.Cluster != wanted.Cluster:
		return Cookie{}, &IdentityError{
			Problem: fmt.Sprintf("%s holds data of cluster %s, and this is cluster %s", d.dir, c.Cluster, wanted.Cluster),
			Advice:  "check --etcd and --cluster, or choose another --data-dir",
		}
	case c.ID != wanted.ID:
		return Cookie{}, &IdentityError{
			Problem: fmt.Sprintf("%s holds data of bookie %q, and this is bookie %q", d.dir, c.ID, wanted.ID),
			Advice:  "check --bookie-id, or choose another --data-dir",
		}
	}
	return c, nil
}

// agrees compares the disk's cookie with the cluster's record.
func (d disk) agrees(c Cookie, record meta.Cookie, recorded bool) error {
	switch {
	case !recorded:
		return &IdentityError{
			Problem: fmt.Sprintf("%s is storage %s of bookie %q, of which the cluster has no record", d.dir, c.Storage, c.ID),
			Advice:  "it was retired, or etcd was restored from an old copy or emptied: see what etcd says before this disk answers for anything",
		}
	case record.UUID != c.Storage:
		return &IdentityError{
			Problem: fmt.Sprintf("%s is storage %s, and the cluster knows bookie %q as storage %s", d.dir, c.Storage, c.ID, record.UUID),
			Advice:  "mount the bookie's own disk; this one was replaced, or belongs to another bookie",
		}
	}
	return nil
}

// record makes the new identity known to the cluster.
func (d disk) record(ctx context.Context, cookies Cookies, c Cookie) error {
	err := cookies.CreateCookie(ctx, meta.Cookie{ID: c.ID, UUID: c.Storage, Created: c.Created})
	switch {
	case errors.Is(err, meta.ErrExists):
		return &IdentityError{
			Problem: fmt.Sprintf("another disk became bookie %q: %v", c.ID, err),
			Advice:  "give each bookie a --bookie-id of its own",
		}
	case errors.Is(err, meta.ErrRetired):
		return &IdentityError{
			Problem: fmt.Sprintf("storage %s at %s was retired", c.Storage, d.dir),
			Advice:  "empty the directory; it then becomes a new identity",
		}
	case err != nil:
		return fmt.Errorf("record the new identity: %w", err)
	}
	return nil
}

// create writes COOKIE.new, durably.
func (d disk) create(c Cookie) error {
	b, err := encodeCookie(c)
	if err != nil {
		return err
	}
	tmp := path.Join(d.dir, cookieTmpName)
	if err := d.fs.Remove(tmp); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return fmt.Errorf("remove old cookie: %w", err)
	}
	f, err := d.fs.Create(tmp)
	if err != nil {
		return fmt.Errorf("create cookie: %w", err)
	}
	_, err = f.WriteAt(b, 0)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write cookie: %w", err)
	}
	return d.rename(cookieTmpName, cookieNewName)
}

// confirm turns COOKIE.new into COOKIE: from now on the disk must have a store.
func (d disk) confirm() error { return d.rename(cookieNewName, cookieName) }

func (d disk) rename(from, to string) error {
	if err := d.fs.Rename(path.Join(d.dir, from), path.Join(d.dir, to)); err != nil {
		return fmt.Errorf("rename cookie: %w", err)
	}
	if err := d.fs.SyncDir(d.dir); err != nil {
		return fmt.Errorf("sync data directory: %w", err)
	}
	return nil
}

// readAll reads a file that is as small as a cookie; of a larger one as much as shows that it is.
func readAll(fs vfs.FS, name string) ([]byte, error) {
	f, err := fs.OpenRead(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, maxCookie+1)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return b[:n], nil
}

// makeDirs creates dir and what is missing above it, durably.
func makeDirs(fs vfs.FS, dir string) error {
	missing := []string{}
	for d := path.Clean(dir); ; d = path.Dir(d) {
		if _, err := fs.Stat(d); err == nil {
			break
		} else if !errors.Is(err, iofs.ErrNotExist) {
			return err
		}
		missing = append(missing, d)
		if path.Dir(d) == d {
			break
		}
	}
	if err := fs.MkdirAll(dir); err != nil {
		return err
	}
	for _, d := range missing {
		if err := fs.SyncDir(path.Dir(d)); err != nil {
			return err
		}
	}
	return nil
}
