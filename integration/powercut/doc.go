// Package powercut cuts the power of a bookie's store on real file systems, again and again, at moments that nobody
// chooses.
//
//	go test ./integration/powercut                                  # a few cuts on each file system
//	go test ./integration/powercut -run TestStore -cuts 300 -fs xfs # as many as wanted
//	make test-powercut                                              # hundreds, and docs/results/power-cuts.md
//
// A process opens the store on a volume (package volume), and does to it what a bookie does, many things at once: adds,
// fences, LACs, recoveries' writes, limbo, deletion; segments roll, are sealed, compacted and recycled meanwhile. It tells each
// request before it makes it, and each answer, through a pipe. What has arrived at the other end before the cut begins
// was acknowledged, and has to be there when the volume is mounted again; what is found there then was
// told to a reader, and has to be there after the next cut as well. The process runs on during the cut, and is killed after it.
package powercut
