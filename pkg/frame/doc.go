// Package frame encodes and decodes the two layers of a stored entry: the producer's batch frame, which is
// never rewritten, and the envelope that the owning broker writes before it, once. docs/formats.md describes
// every byte of both.
//
// The broker checks a frame on its way in, and wraps it:
//
//	f, err := frame.Parse(batch, frame.DefaultLimits()) // magic, CRC32C, sizes: once, here
//	if err != nil {
//		return refuse(err) // a *frame.Error says what is wrong
//	}
//	env := frame.EnvelopeOf(&f)                     // key, publish times, chunk, producer and sequences
//	env.Base, env.BrokerTime = next, now.UnixMilli()
//	body := frame.AppendEnvelope(nil, &env)
//	body = append(body, batch...)
//
// Everyone behind the broker reads the envelope instead of the frame:
//
//	env, batch, err := frame.ParseEnvelope(body)
//
// Only clients look inside a batch. They decompress the payload themselves, which keeps compression libraries
// out of brokers and bookies:
//
//	f, err := frame.Parse(batch, limits)
//	for m, err := range f.Messages(payload) { … }
//
// and build frames with [AppendMessage] and [Append].
//
// All decoders alias their input and allocate nothing that grows with it; every length is compared with what
// is left of the input before it is used.
package frame
