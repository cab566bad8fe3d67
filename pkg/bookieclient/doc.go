// Package bookieclient carries requests to bookies: [Client] over the framed TCP protocol of
// pkg/bookiewire, [Fake] to bookies in memory with the same terms, fences, admission and answers, which a
// test scripts. Both have the same five methods, and the same promises:
//
//		client := bookieclient.New(config, resolve, log, registerer)
//		client.Add(uuid, &bookiewire.Add{…}, func(err error) { … })     // never blocks
//		client.Read(ctx, uuid, bookiewire.Read{…}, func(r bookiewire.ReadReply, err error) { … })
//		…
//		client.Close()                                                 // every done has been called
//
//	  - Add, Read and Fence return at once; done is called exactly once, never from within the call itself, and
//	    never under a lock.
//	  - An error is a *[bookiewire.Error], always. Its Code says which class the answer is in; Disconnected is
//	    "no answer will come", and the request may have been carried out.
//	  - The body of an Add is the client's until done. The body of a read entry is the caller's, its checksum
//	    not yet verified.
//	  - Adds from one client to one bookie arrive in the order of the calls, as long as the connection lasts.
package bookieclient
