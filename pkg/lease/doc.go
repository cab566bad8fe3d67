// Package lease keeps leases in etcd alive and holds elections on them.
//
//	session, err := lease.NewSession(ctx, client, 5*time.Second, log)
//	defer session.Close(ctx)
//	for {
//		grant, err := session.Wait(ctx)        // the lease of now
//		store.RegisterBroker(ctx, me, grant.ID, 0)
//		<-grant.Lost()                         // etcd said that it is gone: register again under the next
//	}
//
// A lease is only liveness. Whoever must not act after another may have taken over compares an epoch in its
// transactions; what can't do that (an acknowledgement that needs no transaction) asks [Session.Alive] first,
// which goes by the local monotonic clock and by nothing that etcd says too late.
package lease
