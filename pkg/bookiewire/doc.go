// Package bookiewire holds the messages between broker and bookie (and bookie and bookie) on the data
// path, and their bytes: a handshake, then length-prefixed frames with a small fixed header over TCP.
//
// The package does no I/O and starts no goroutine. Encoders append to an [Encoder], whose buffers go to
// the socket in one writev without a body being copied; decoders take exactly one frame's bytes, check
// every length against what is there before anything is allocated, and alias the bytes they are given
// where they say so. docs/formats.md specifies the bytes.
package bookiewire
