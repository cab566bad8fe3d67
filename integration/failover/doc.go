// Package failover measures how long publishing and delivery stand still when a process dies or stops: brokers, bookies and
// etcd are real processes, a client publishes steadily and reads along, and each kind of strike is dealt a hundred times.
//
//	make bench-failover KILLS=100                     # all of it, some 20 minutes, into docs/results/failover.md
//	go test ./integration/failover                    # one strike of each kind, judged for safety alone
//	go test ./integration/failover -run Strikes/stop-owner -kills 20 -v -artifacts
//
// A strike begins when the cluster is whole: each process says that it is ready, each broker knows all others and all bookies, and
// messages flow. It ends when the cluster is whole again. The gap is the longest time within it without an acknowledgement, or
// without the delivery of something new, less the time between two messages; where the process comes back makes a gap too, and
// is part of it. Beside the strikes stand as many stretches of time without any ("nothing"): what the machine itself does.
//
// Where the time goes is told by a [timeline]: etcd's changes as they arrive here, the processes' logs, the client's log. The
// rejected alternative, trace points in the brokers, would have measured what nobody else can see.
package failover
