// Package ledgerstore is a bookie's log store: one log of segments that is write-ahead log and store at once, the
// index over it, terms, limbo marks, LACs and tombstones, space, deletion and compaction.
//
// The loop of its caller, a bookie:
//
//	s, err := ledgerstore.Open(ctx, cfg, vfs.OS(), log, reg) // recovered, index complete, ready to serve
//	if loss := s.Loss(); loss.All {
//		err = s.SetLimbo(ctx, ledgers...) // those that metadata says this disk holds and that are not closed
//		err = s.EndLoss(ctx)
//	}
//	for each request {
//		known, generation := s.Admission(add.Ledger)
//		if !known {
//			// read the ledger's metadata, linearizably; refuse unless it lets this writer write here
//		}
//		s.Add(&ledgerstore.Add{Add: add, Generation: generation, Done: reply})
//	}
//	select {
//	case err := <-s.Fatal(): // a write or sync failed: leave the process, restart reads the disk afresh
//	case <-s.StateChanged(): // s.State() says what is taken now
//	}
//	err = s.Close()
//
// What a reply promises. Done(nil) of an add, a fence, a LAC or a limbo mark: it is on disk, by fdatasync, and so is
// everything that was accepted before it. Replies leave in the order of acceptance. A fence's reply and a recovery
// read's answer, a negative one too, come after the term is on disk and after every add that was accepted before.
// Once a write or sync has failed nothing is promised any more and each request is answered Unknown.
//
// Files: NNNNNNNNNNNNNNNN-GGGG.seg are segments (sequence and rewrite, hexadecimal), spare-N.seg are kept for reuse
// and as the reserve for a full disk, MANIFEST lists the segments that count, ROOM takes the space that the next one needs,
// LOCK keeps a second process out.
// A segment that the manifest does not list holds nothing that was ever acknowledged and is removed on Open; one that
// it lists and that is missing or unreadable puts what it may have held in limbo.
//
// Inside. core.go, with commit.go, roll.go and events.go, is the commit pipeline: a state machine that takes events (add, fence, written, synced, …) and
// returns actions (append, sync, roll, seal, reply), without goroutines, clock or files. runner.go owns the
// goroutines, carries the actions out and feeds back what became of them. table.go is what is known of each ledger,
// written by the core alone, read by everyone.
package ledgerstore
