// Package chain is one log over many ledgers: it opens, rolls, recovers, reads across and trims the ledgers of
// a topic's data log or a bundle's state log.
//
//	c, err := chain.Open(ctx, env, guard, id, cfg)   // recovers the ledger that a former owner left open
//	first := c.NextOffset()
//	c.Append(chain.Append{Body: body, Span: 3, Time: now, Done: func(p entry.Position, err error) { … }})
//	entries, next, err := c.Read(ctx, from, 1<<20)   // only what is confirmed
//	freed, err := c.Trim(ctx, func(r meta.Run) bool { return r.End <= floor })
//	err = c.Close(ctx)                               // or <-c.Lost(): another owner took over
//
// # What happens to an append
//
// Appends take offsets in the order in which they come in, and those of one ack level are done in that order. Each goes to the open
// ledger at once; while there is none, or it is being closed, it waits. A ledger that reaches its limits is closed
// and the next one opened in one transaction; what was sent to the old one and lies above its end is definitely
// not stored there, and goes to the next ledger, before anything newer. So a roll is not seen from outside.
//
// When no ledger can be opened (etcd or too many bookies away), the appends that wait fail as definitely not
// written, and the chain refuses more until [Chain.Resume]: the caller, who has built offsets into bodies, then
// starts again from [Chain.NextOffset]. When the ownership is lost, appends in flight have an unknown outcome, and
// the chain is of no more use: drop it, and whatever was derived from it.
//
// A roll that cannot reach etcd leaves the old ledger open, and goes on trying: the limits are soft.
//
// A chain has no goroutine and no timer while nothing is in flight.
package chain
