// Package bookie is the storage node: it joins a [ledgerstore.Store] to the network and to the cluster's metadata.
//
//	b, err := bookie.Start(ctx, config, bookie.Env{Meta: …, Session: …, FS: vfs.OS(), Log: log, Registry: registry})
//	if err != nil {
//		return err // refused to start, with what to do, or ctx ended
//	}
//	select {
//	case <-ctx.Done():
//	case err = <-b.Failed(): // the disk failed: leave the process
//	}
//	b.Shutdown(drainCtx)
//
// Start goes through the boot order of the ledger protocol: identity (both cookies agree, or it refuses), store
// (scan, truncate, limbo), registration, service.
//
//   - server.go, conn.go, requests.go: the data path. admission.go: who may create a ledger here, without a connection in it, so that a
//     simulation runs it.
//   - cookie.go, identity.go, start.go, claim.go: who this disk is, and whether the bookie may start on it.
//   - gc.go: what may be deleted, as a pure decision; collector.go carries it out, revision.go stops it when etcd went back.
//   - registration.go: what the cluster knows of a live bookie.
//   - scrub.go: what is stored is read again, slowly, so that damage is found while there are other copies.
//   - control.go, health.go: for operators and probes.
//   - node.go: construction, order, shutdown.
package bookie
