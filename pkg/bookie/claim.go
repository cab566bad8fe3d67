package bookie

import (
	"context"
	"path"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// Claimant is a bookie that is about to start on a disk. All fields but Mint are required.
type Claimant struct {
	FS      vfs.FS
	Dir     string // the data directory, which exists and is locked
	ID      string // the bookie's
	Cluster entry.UUID
	Cookies Cookies
	// Mint gives a new disk its identity; nil: a random one.
	Mint func() entry.StorageUUID
}

// Claim is a start of a bookie on its disk, as far as the bookie may start.
//
//	c, err := claimant.Claim(ctx)  // an [*IdentityError]: this disk must not answer for the bookie
//	…                              // open the store in c.StoreDir
//	err = c.Opened()
//	…                              // see to it that no other process lives under this identity
//	err = c.Count(ctx)             // and serve
type Claim struct {
	Who Identity
	// StoreDir is where the store is, or is to be.
	StoreDir string
	// Fresh says that the store was never open.
	Fresh bool

	confirm func() error
	starts  *starts
}

// Claim establishes who the disk is, as [Identify] does, and that it is the one that the bookie ran on last.
func (c Claimant) Claim(ctx context.Context) (*Claim, error) {
	mint := c.Mint
	if mint == nil {
		mint = meta.NewUUID
	}
	d := disk{fs: c.FS, dir: c.Dir}
	who, confirm, err := d.identify(ctx, c.ID, c.Cluster, c.Cookies, mint)
	if err != nil {
		return nil, err
	}
	s, err := d.loadStarts(ctx, who, c.Cookies)
	if err != nil {
		return nil, err
	}
	return &Claim{Who: who, StoreDir: path.Join(c.Dir, storeDir), Fresh: confirm != nil, confirm: confirm, starts: s}, nil
}

// Opened says that the store has been opened: from now on the disk must have one.
func (c *Claim) Opened() error {
	if c.confirm == nil {
		return nil
	}
	return c.confirm()
}

// Count counts the start, on the disk and in the cluster's record, before anything is served. Of two that have claimed the same
// identity the second gets an [*IdentityError].
func (c *Claim) Count(ctx context.Context) error { return c.starts.count(ctx) }
