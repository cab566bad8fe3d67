package bookie

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

// usurp registers another process for the identity of b, in place of b's own registration.
func (w *town) usurp(info meta.BookieInfo, addr string, over clientv3.LeaseID) clientv3.LeaseID {
	w.t.Helper()
	grant, err := etcd.Client().Grant(w.t.Context(), 600)
	w.check(err)
	info.Data = addr
	w.check(w.meta.RegisterBookie(w.t.Context(), info, grant.ID, over))
	return grant.ID
}

// answerAs answers each connection as the bookie w says it is.
func answerAs(t *testing.T, welcome bookiewire.Welcome) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := bookiewire.ReadHello(c); err == nil {
				b, err := bookiewire.AppendWelcome(nil, welcome)
				if err != nil {
					t.Error(err)
				}
				_, _ = c.Write(b)
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	return l.Addr().String()
}

func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Two disks with one identity would each deny what the other has acknowledged: the second one does not start, and the
// first one goes on.
func TestCopyOfADataDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	original, duplicate := t.TempDir(), t.TempDir()
	first := w.start(w.config(original), vfs.OS())
	w.check(os.CopyFS(duplicate, os.DirFS(original)))
	_, err := Start(t.Context(), w.config(duplicate), w.env(vfs.OS()))
	var ie *IdentityError
	if !errors.As(err, &ie) || !strings.Contains(ie.Problem, first.DataAddr()) || !strings.Contains(ie.Advice, "copy") {
		t.Fatalf("got %v", err)
	}
	w.await(first.Storage(), func(i meta.BookieInfo, _ bool) bool { return i.Data == first.DataAddr() })
	l := w.open(first.Storage())
	if c := addTo(w.client(), first.Storage(), makeAdd(l.ID, 0, "x")); c != bookiewire.OK {
		t.Fatalf("the original: %s", c)
	}

	// That a copy was tried does not make the original an old one; that the original has started again makes one of the copy.
	w.check(first.Shutdown(t.Context()))
	first = w.start(w.config(original), vfs.OS())
	w.check(first.Shutdown(t.Context()))
	_, err = Start(t.Context(), w.config(duplicate), w.env(vfs.OS()))
	if !errors.As(err, &ie) || !strings.Contains(ie.Problem, "old copy") {
		t.Fatalf("got %v", err)
	}
	w.start(w.config(original), vfs.OS())
}

// A bookie that was killed and comes back before its lease has ended does not wait for that.
func TestBookieReplacesTheRegistrationOfItsEarlierLife(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	dir := t.TempDir()
	b := w.start(w.config(dir), vfs.OS())
	u, cluster := b.Storage(), b.me.Cluster
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	info, _ := w.cache.Bookie(u)
	w.check(b.Shutdown(t.Context()))
	for what, addr := range map[string]string{
		"nobody listens":             closedPort(t),
		"another bookie":             answerAs(t, bookiewire.Welcome{Code: bookiewire.Unknown, Cluster: cluster, Storage: entry.StorageUUID{5}}),
		"a bookie of other clusters": answerAs(t, bookiewire.Welcome{Code: bookiewire.Unknown, Storage: u}),
	} {
		w.usurp(info, addr, 0)
		b := w.start(w.config(dir), vfs.OS())
		held, err := w.meta.BookieLease(t.Context(), u)
		if err != nil || held != b.session.ID() {
			t.Errorf("%s: registered under %x, %v", what, held, err)
		}
		w.check(b.Shutdown(t.Context()))
	}
}

// As long as it cannot be told whether another process lives, its lease decides.
func TestBookieWaitsForASilentHolder(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	dir := t.TempDir()
	b := w.start(w.config(dir), vfs.OS())
	u := b.Storage()
	info := b.registration()
	w.check(b.Shutdown(t.Context()))
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	w.check(err)
	defer silent.Close()
	held := w.usurp(info, silent.Addr().String(), 0)

	ctx, cancel := context.WithTimeout(t.Context(), holderTimeout+500*time.Millisecond)
	defer cancel()
	if _, err := Start(ctx, w.config(dir), w.env(vfs.OS())); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if now, err := w.meta.BookieLease(t.Context(), u); err != nil || now != held {
		t.Fatalf("registered under %x, %v", now, err)
	}
	_, err = etcd.Client().Revoke(t.Context(), held)
	w.check(err)
	w.start(w.config(dir), vfs.OS())
}

// A registration that was removed comes back; one that a living process has taken ends the bookie.
func TestBookieWatchesItsRegistration(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	b := w.start(w.config("data"), vfs.NewMem())
	u := b.Storage()
	w.await(u, func(_ meta.BookieInfo, ok bool) bool { return ok })
	w.check(w.meta.DeregisterBookie(t.Context(), u, b.session.ID()))
	w.await(u, func(meta.BookieInfo, bool) bool {
		_, err := w.meta.BookieLease(t.Context(), u) // the watch may lag behind
		return err == nil
	})

	addr := answerAs(t, bookiewire.Welcome{Version: 1, Cluster: b.me.Cluster, Storage: u, BookieID: "bookie-1"})
	w.usurp(b.registration(), addr, b.session.ID())
	select {
	case err := <-b.Failed():
		var ie *IdentityError
		if !errors.As(err, &ie) || !strings.Contains(err.Error(), addr) {
			t.Fatalf("got %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("it goes on beside another process")
	}
}

// The registrar ends when it is told to, also with a change of state that it has not made known.
func TestRegistrarEndsWithNews(t *testing.T) {
	t.Parallel()
	w := newTown(t)
	b := w.start(w.config("data"), vfs.NewMem())
	grant, err := b.session.Wait(t.Context())
	w.check(err)
	r := b.registrar()
	news := r.info()
	news.State = meta.BookieFull
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.check(r.Run(ctx, Registration{grant: grant, info: news}))
}
