// Package dispatch brings stored entries to consumers: who gets what, when, and why not yet.
//
// Each subscription type is a [Core], a pure state machine: [NewExclusive], [NewFailover], [NewShared],
// [NewReader]. It is told what happened by its event methods, and [Core.Next] says what to do next. Next is
// computed from state alone, never from having seen an event: an event that was reported twice, late, or
// together with others cannot make it miss work. When there is nothing to do it returns the [Reason] it waits
// for, and [Core.Status] tells the same to people.
//
// A [Runner] drives one core with one goroutine, which exists only while the subscription has consumers:
//
//	for {
//		switch a := core.Next(time.Now()); a.Kind {
//		case ActionRead:       entries, next, err := source.Read(…) → core.EntriesRead or core.ReadFailed
//		case ActionSend:       sinks[a.Consumer].Send(a.Deliveries)
//		case ActionActivate:   sinks[a.Consumer].Active(true)
//		case ActionDeactivate: sinks[a.Consumer].Active(false)
//		case ActionRetries:    env.OnRetries(a.Generation, a.Retries)
//		case ActionWait:       sleep until a.Until or until something happens
//		}
//	}
//
// The broker's order of things: apply an acknowledgement to the cursor first, then call [Runner.Acked]; move
// the cursor first, then call [Runner.Seek]. Both say in which generation of the cursor that was, so that they may come
// here in another order than there.
//
// What is kept per message is nothing: deliveries that are not acknowledged are offset ranges per consumer,
// redeliveries and their counts too. Entries are held only between a read and the sends that follow it, and a
// read happens only when a consumer may receive its first message.
package dispatch
