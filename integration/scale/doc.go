// Package scale measures what many topics cost: how fast they are made, what each takes of every process while it is idle and
// while it is used, how publishing on ten thousand compares with publishing as much on ten, how long their takeover takes, and
// what grows with topics that nobody uses. Brokers, bookies and etcd are real processes.
//
//	make bench-scale TOPICS=10000 IDLE=100000       # all of it, some 15 minutes, into docs/results/scale.md
//	go test ./integration/scale                     # a few topics, so that the measurement itself does not rot
//
// The order matters: what a step leaves behind is the next one's beginning.
//
//	base   nothing but the cluster
//	make   topics, each with a producer and a subscription that reads along
//	quiet  all of them connected, none used
//	use    publishing on all of them, and on ten, in turns
//	take   kill -9 of the broker that has more of them
//	left   the clients are gone, the topics are open
//	back   kill -9 of a bookie whose segments are not sealed
//	idle   topics that exist and that nobody has ever used, in steps
//
// Memory is what the processes hold after a garbage collection (heap in use by objects, and stacks), and what the system counts as
// theirs. The latter contains what the runtime has not given back, and is the upper bound that a machine needs.
package scale
