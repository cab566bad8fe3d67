package meta_test

import (
	"errors"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/meta"
)

func TestRepairRecords(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, armed := f.lossyStore() // each change is one change, though its reply is lost
	ctx := t.Context()
	since := time.UnixMilli(5000)
	if _, err := s.GetRepair(ctx, 7); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	for _, bad := range []meta.RepairCause{0, meta.AllRepairCauses + 1} {
		if err := s.NoteRepair(ctx, meta.Repair{Ledger: 7, Causes: bad}); !errors.Is(err, meta.ErrInvalid) {
			t.Fatalf("causes %#x: %v", uint32(bad), err)
		}
	}
	first := meta.Repair{
		Ledger: 7, Causes: meta.CauseLost, Since: since, Storages: []entry.StorageUUID{storage(1)}, Counts: meta.RepairCounts{BelowWriteQuorum: 9},
		Retry: since.Add(time.Hour),
	}
	armed.Store(true)
	check(t, s.NoteRepair(ctx, first))
	got, err := s.GetRepair(ctx, 7)
	check(t, err)
	if got.Causes != meta.CauseLost || !got.Since.Equal(since) || len(got.Storages) != 1 || got.Counts != first.Counts || !got.Retry.Equal(first.Retry) {
		t.Fatalf("got %+v", got)
	}
	again := first
	again.Since = since.Add(time.Minute)
	check(t, s.NoteRepair(ctx, again))
	if same, err := s.GetRepair(ctx, 7); err != nil || same.Rev != got.Rev {
		t.Fatalf("what is known was written again: %+v, %v", same, err)
	}
	check(t, s.NoteRepair(ctx, meta.Repair{Ledger: 7, Causes: meta.CauseHint}))
	more, err := s.GetRepair(ctx, 7)
	check(t, err)
	if more.Causes != meta.CauseLost|meta.CauseHint || more.Counts != first.Counts || !more.Retry.IsZero() {
		t.Fatalf("got %+v", more)
	}
	if _, err := s.UpdateRepair(ctx, got); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("an old record was replaced: %v", err)
	}
	if err := s.EndRepair(ctx, got); !errors.Is(err, meta.ErrConflict) {
		t.Fatalf("an old record was ended: %v", err)
	}
	more.Stuck, more.Worker, more.Doing, more.CopiedEntries, more.CopiedBytes, more.Failures = "no bookie", "b1", "copy", 3, 99, 2
	armed.Store(true)
	more, err = s.UpdateRepair(ctx, more)
	check(t, err)
	if now, err := s.GetRepair(ctx, 7); err != nil || now.Rev != more.Rev || now.Stuck != "no bookie" || now.CopiedBytes != 99 || now.Failures != 2 {
		t.Fatalf("got %+v, %v", now, err)
	}
	armed.Store(true)
	check(t, s.EndRepair(ctx, more))
	check(t, s.EndRepair(ctx, more))
	if _, err := s.UpdateRepair(ctx, more); !errors.Is(err, meta.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
}

// One worker has a ledger at a time, as long as its lease lives.
func TestRepairClaims(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	other := newLease(t)
	claims := func(want bool, id entry.LedgerID, worker string, mine bool) {
		t.Helper()
		lease := f.lease
		if !mine {
			lease = other
		}
		if got, err := f.ClaimRepair(ctx, id, worker, lease); err != nil || got != want {
			t.Fatalf("claim of ledger %d by %s: %t, %v", id, worker, got, err)
		}
	}
	claims(false, 7, "b1", true) // nothing is to be repaired
	check(t, f.NoteRepair(ctx, meta.Repair{Ledger: 7, Causes: meta.CauseLost}))
	check(t, f.NoteRepair(ctx, meta.Repair{Ledger: 9, Causes: meta.CauseLost}))
	claims(true, 7, "b1", true)
	claims(true, 7, "b1", true)
	claims(false, 7, "b2", false)
	claims(true, 9, "b2", false)
	list, err := f.ListRepairs(ctx, 0, 1)
	check(t, err)
	if list.Total != 2 || len(list.Repairs) != 1 || list.Repairs[0].Ledger != 7 || list.Claims[7] != "b1" || list.Claims[9] != "b2" {
		t.Fatalf("got %+v", list)
	}
	if list, err = f.ListRepairs(ctx, 7, 10); err != nil || len(list.Repairs) != 1 || list.Repairs[0].Ledger != 9 {
		t.Fatalf("got %+v, %v", list, err)
	}
	check(t, f.ReleaseRepair(ctx, 7, other)) // it is not the other's
	claims(false, 7, "b2", false)
	_, err = etcd.Client().Revoke(ctx, f.lease)
	check(t, err)
	claims(true, 7, "b2", false)
	check(t, f.ReleaseRepair(ctx, 7, other))
	if _, err := f.ClaimRepair(ctx, 7, "b1", f.lease); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("a lease that is gone: %v", err)
	}
	if _, err := f.ClaimRepair(ctx, 7, "b1", 0); !errors.Is(err, meta.ErrLease) {
		t.Fatalf("no lease: %v", err)
	}
	if got, err := f.ClaimAudit(ctx, "b2", other); err != nil || !got {
		t.Fatalf("audit: %t, %v", got, err)
	}
	if got, err := f.ClaimAudit(ctx, "b3", newLease(t)); err != nil || got {
		t.Fatalf("a second auditor: %t, %v", got, err)
	}
	if got, err := f.ClaimAudit(ctx, "b2", other); err != nil || !got {
		t.Fatalf("audit once more: %t, %v", got, err)
	}
}

func TestRepairCensus(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	if c, err := f.GetRepairCensus(ctx); err != nil || c.Auditor != "" || len(c.Absent) != 0 {
		t.Fatalf("got %+v, %v", c, err)
	}
	at := time.UnixMilli(9000)
	want := meta.RepairCensus{
		Auditor: "b1", At: at, Waiting: 3, Compared: 8, ComparedAll: at,
		Absent: []meta.AbsentBookie{{ID: "k1", UUID: storage(1), Since: at, Lost: at.Add(time.Minute), Ledgers: 5}},
	}
	check(t, f.PutRepairCensus(ctx, want))
	c, err := f.GetRepairCensus(ctx)
	check(t, err)
	if c.Auditor != "b1" || !c.At.Equal(at) || c.Waiting != 3 || c.Compared != 8 || !c.ComparedAll.Equal(at) || len(c.Absent) != 1 ||
		c.Absent[0].ID != "k1" || c.Absent[0].UUID != storage(1) || !c.Absent[0].Lost.Equal(at.Add(time.Minute)) || c.Absent[0].Ledgers != 5 {
		t.Fatalf("got %+v", c)
	}
	if got := (meta.CauseLost | meta.CauseOpen).String(); got != "lost,open" {
		t.Errorf("causes are %q", got)
	}
}
