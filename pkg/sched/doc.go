// Package sched is what blocking code goes through wherever it asks for the time, starts something, or waits: the
// runners around Penstock's state machines. So the same code runs on goroutines and the clock in the product, and one step
// at a time, in an order drawn from a seed, in a simulation.
//
//	s := sched.OrReal(env.Sched)
//	g := sched.NewGroup(s)
//	g.Go(func() { … })                                       // instead of go, and of sync.WaitGroup
//	i, err := s.Wait(ctx, sched.Channels{w.Broken(), woken}) // instead of select
//	ctx, cancel := s.WithTimeout(ctx, d)                     // instead of context.WithTimeout
//	g.Wait()
//
// What runs under a scheduler keeps to this: it waits only here; it holds no sync.Mutex while it waits; channels that are
// waited for carry nothing (a result stands beside the channel that tells of it); it does not use context.AfterFunc,
// timers of package time, or randomness of its own. Contexts made by context.WithCancel are fine.
//
// The rejected alternative, testing/synctest, simulates time, but not the order in which goroutines run, so a seed
// would not come back.
package sched
