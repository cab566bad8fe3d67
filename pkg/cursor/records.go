package cursor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-mq/penstock/pkg/entry"
)

// The kinds of record that cursors keep in a state log. Kinds 16 to 31 are theirs.
const (
	KindSubscription uint8 = 16 // what a subscription is
	KindState        uint8 = 17 // its generation and floor
	KindPage         uint8 = 18 // a page of it
	KindDelta        uint8 = 19 // a change of a page
)

// IsKind reports whether records of this kind belong to cursors.
func IsKind(kind uint8) bool { return kind >= 16 && kind < 32 }

// Record is a keyed record of the state log. The last one written under (Kind, Key) counts; one with Delete
// set takes the key away and has no Value. Key and Value are the receiver's to keep, not to change.
type Record struct {
	Kind       uint8
	Key, Value []byte
	Delete     bool
}

// Size returns about what the record takes in the log, in bytes.
func (r Record) Size() int { return len(r.Key) + len(r.Value) + recordOverhead }

const recordOverhead = 8

// CorruptError refuses a subscription because one of its records is damaged or lacking. Nothing is reset.
type CorruptError struct {
	Subscription entry.UUID
	Kind         uint8
	Page         uint64 // of KindPage and KindDelta
	Reason       string
}

// Error says what is damaged.
func (e *CorruptError) Error() string {
	what := fmt.Sprintf("record of kind %d", e.Kind)
	switch e.Kind {
	case KindSubscription:
		what = "subscription record"
	case KindState:
		what = "state record"
	case KindPage:
		what = fmt.Sprintf("page %d", e.Page)
	case KindDelta:
		what = fmt.Sprintf("change of page %d", e.Page)
	}
	return fmt.Sprintf("cursor of subscription %s: %s: %s", e.Subscription, what, e.Reason)
}

// The first byte of every value. In pages and their changes of version 1, delays were times of day.
const (
	formatVersion = 1
	pageVersion   = 2
)

func versionOf(kind uint8) byte {
	if kind == KindPage || kind == KindDelta {
		return pageVersion
	}
	return formatVersion
}

// Forms of the acknowledged set of a page, on disk.
const (
	formRuns   = 0 // pairs of first and last index, 2 bytes each
	formArray  = 1 // indices, 2 bytes each
	formBitmap = 2 // 8,192 bytes, index 0 is the lowest bit of the first
)

const (
	uuidBytes     = 16
	pageKeyBytes  = uuidBytes + 4 + 8
	deltaKeyBytes = pageKeyBytes + 8
	crcBytes      = 4
	bitmapBytes   = pageSize / 8
	flagDeleted   = 1
)

func (k pageKeys) pageKey(id entry.UUID) []byte {
	key := make([]byte, 0, deltaKeyBytes)
	key = append(key, id[:]...)
	key = binary.BigEndian.AppendUint32(key, uint32(k.generation))
	return binary.BigEndian.AppendUint64(key, k.number)
}

func (k pageKeys) deltaKey(id entry.UUID, seq uint64) []byte {
	return binary.BigEndian.AppendUint64(k.pageKey(id), seq)
}

// deletions appends the deletion of every record of the page.
func (k pageKeys) deletions(dst []Record, id entry.UUID) []Record {
	if k.hasSnap {
		dst = append(dst, Record{Kind: KindPage, Key: k.pageKey(id), Delete: true})
	}
	for seq := k.snapSeq + 1; seq <= k.seq; seq++ {
		dst = append(dst, Record{Kind: KindDelta, Key: k.deltaKey(id, seq), Delete: true})
	}
	return dst
}

// seal appends the checksum, which covers kind and key too: a value under a wrong key is damage.
func seal(kind uint8, key, value []byte) Record {
	return Record{Kind: kind, Key: key, Value: binary.BigEndian.AppendUint32(value, checksum(kind, key, value))}
}

func checksum(kind uint8, key, value []byte) uint32 {
	crc := entry.CRC32C([]byte{kind})
	return entry.UpdateCRC32C(entry.UpdateCRC32C(crc, key), value)
}

func (c *Cursor) metaRecord(deleted bool) Record {
	v := make([]byte, 0, 32+len(c.meta.Name))
	var flags byte
	if deleted {
		flags |= flagDeleted
	}
	v = append(v, formatVersion, flags)
	v = binary.BigEndian.AppendUint64(v, uint64(c.meta.Initial))
	v = binary.BigEndian.AppendUint64(v, uint64(c.meta.Created))
	v = binary.AppendUvarint(v, uint64(len(c.meta.Name)))
	v = append(v, c.meta.Name...)
	return seal(KindSubscription, slices.Clone(c.meta.UUID[:]), v)
}

func (c *Cursor) stateRecord() Record {
	v := make([]byte, 0, 17)
	v = append(v, formatVersion)
	v = binary.BigEndian.AppendUint32(v, uint32(c.generation))
	v = binary.BigEndian.AppendUint64(v, uint64(c.floor))
	return seal(KindState, slices.Clone(c.meta.UUID[:]), v)
}

func (c *Cursor) deltaRecord(p *page, now int64) Record {
	v := make([]byte, 0, 16+4*len(p.pend)+16*len(p.pendRetry))
	v = append(v, pageVersion)
	v = binary.AppendUvarint(v, uint64(len(p.pend)))
	at := 0
	for _, r := range p.pend {
		v = binary.AppendUvarint(v, uint64(int(r.first)-at))
		v = binary.AppendUvarint(v, uint64(r.last-r.first))
		at = int(r.last) + 1
	}
	v = c.appendRetries(v, p, p.pendRetry, now)
	return seal(KindDelta, p.deltaKey(c.meta.UUID, p.seq), v)
}

func (c *Cursor) pageRecord(p *page, now int64) Record {
	runs, n := p.acked.countRuns(), p.acked.n
	form, size := byte(formRuns), 4*runs
	if 2*n < size {
		form, size = formArray, 2*n
	}
	if bitmapBytes < size {
		form, size = formBitmap, bitmapBytes
	}
	v := make([]byte, 0, size+32)
	v = append(v, pageVersion, form)
	v = binary.AppendUvarint(v, p.snapSeq)
	switch form {
	case formRuns:
		v = binary.AppendUvarint(v, uint64(runs))
	case formArray:
		v = binary.AppendUvarint(v, uint64(n))
	}
	if form == formBitmap && p.acked.bits != nil {
		for _, w := range p.acked.bits {
			v = binary.LittleEndian.AppendUint64(v, w)
		}
	} else if form == formBitmap {
		panic("cursor: a page of few runs is smallest as a bitmap")
	} else {
		for i := p.acked.nextSet(0); i < pageSize; {
			end := p.acked.nextClear(i)
			if form == formRuns {
				v = binary.BigEndian.AppendUint16(v, uint16(i))
				v = binary.BigEndian.AppendUint16(v, uint16(end-1))
			} else {
				for ; i < end; i++ {
					v = binary.BigEndian.AppendUint16(v, uint16(i))
				}
			}
			i = p.acked.nextSet(end)
		}
	}
	v = c.appendRetries(v, p, []run{{0, pageMask}}, now)
	return seal(KindPage, p.pageKey(c.meta.UUID), v)
}

// appendRetries appends the retries in the given runs of a page.
func (c *Cursor) appendRetries(v []byte, p *page, in []run, now int64) []byte {
	base := entry.Offset(p.number << pageBits)
	each := func(f func(r Range, retry Retry)) {
		if c.retries.Len() == 0 {
			return
		}
		for _, run := range in {
			for r, retry := range c.retries.Within(Range{First: base + entry.Offset(run.first), End: base + entry.Offset(run.last) + 1}) {
				f(r, retry)
			}
		}
	}
	n := uint64(0)
	each(func(Range, Retry) { n++ })
	v = binary.AppendUvarint(v, n)
	at := base
	each(func(r Range, retry Retry) {
		v = binary.AppendUvarint(v, uint64(r.First-at))
		v = binary.AppendUvarint(v, r.Len()-1)
		v = binary.AppendUvarint(v, uint64(retry.Count))
		v = binary.AppendUvarint(v, uint64(max(retry.NotBefore-now, 0)))
		v = binary.BigEndian.AppendUint32(v, retry.KeyHash)
		v = append(v, byte(retry.Reason))
		at = r.End
	})
	return v
}

// decoder reads a value; the first thing that is wrong stops it.
type decoder struct {
	b   []byte
	err error
}

var (
	errShort    = errors.New("value is too short")
	errChecksum = errors.New("checksum does not match")
	errTrailing = errors.New("bytes follow its end")
	errOrder    = errors.New("ranges do not ascend or leave the page")
)

// unseal checks the checksum and version of a record's value and returns a decoder of what is between.
func unseal(r Record) *decoder {
	d := &decoder{}
	n := len(r.Value) - crcBytes
	if n < 1 {
		d.err = errShort
		return d
	}
	d.b = r.Value[:n]
	if binary.BigEndian.Uint32(r.Value[n:]) != checksum(r.Kind, r.Key, d.b) {
		d.err = errChecksum
		return d
	}
	if v := d.byte(); d.err == nil && v != versionOf(r.Kind) {
		d.err = fmt.Errorf("format version %d is not known here", v)
	}
	return d
}

func (d *decoder) fail(err error) {
	if d.err == nil {
		d.err = err
	}
}

// next returns the next n bytes, or n zero bytes after an error; n is at most 8192.
func (d *decoder) next(n int) []byte {
	if d.err == nil && len(d.b) < n {
		d.err = errShort
	}
	if d.err != nil {
		return make([]byte, n)
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) byte() byte     { return d.next(1)[0] }
func (d *decoder) uint16() uint16 { return binary.BigEndian.Uint16(d.next(2)) }
func (d *decoder) uint32() uint32 { return binary.BigEndian.Uint32(d.next(4)) }
func (d *decoder) uint64() uint64 { return binary.BigEndian.Uint64(d.next(8)) }

// uvarint reads a number ≤ limit.
func (d *decoder) uvarint(limit uint64) uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.err = errShort
		return 0
	}
	if v > limit {
		d.err = fmt.Errorf("number %d is above %d", v, limit)
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		d.err = errTrailing
	}
	return d.err
}

func decodeMeta(r Record, id entry.UUID) (m Meta, deleted bool, err error) {
	d := unseal(r)
	flags := d.byte()
	if flags&^flagDeleted != 0 {
		d.fail(fmt.Errorf("flags %#x are not known here", flags))
	}
	m = Meta{UUID: id, Initial: entry.Offset(d.uint64()), Created: int64(d.uint64())}
	m.Name = string(d.next(int(d.uvarint(MaxName))))
	if err := d.end(); err != nil {
		return Meta{}, false, err
	}
	return m, flags&flagDeleted != 0, m.validate()
}

func decodeState(r Record) (Generation, entry.Offset, error) {
	d := unseal(r)
	g, floor := Generation(d.uint32()), entry.Offset(d.uint64())
	return g, floor, d.end()
}

// retryAt is a decoded retry: a range of indices of its page, and NotBefore from the moment on when it was written.
type retryAt struct {
	first, last int
	Retry
}

func (d *decoder) retries() []retryAt {
	n := d.uvarint(pageSize)
	var out []retryAt // grows with the input: each takes ≥ 9 bytes of it
	at := 0
	for range n {
		var r retryAt
		r.first = at + int(d.uvarint(pageMask))
		r.last = r.first + int(d.uvarint(pageMask))
		r.Count = uint32(d.uvarint(1<<32 - 1))
		r.NotBefore = int64(d.uvarint(1<<63 - 1))
		r.KeyHash, r.Reason = d.uint32(), RetryReason(d.byte())
		if r.last > pageMask {
			d.fail(errOrder)
		}
		if d.err != nil {
			return nil
		}
		at = r.last + 1
		out = append(out, r)
	}
	return out
}

// decodedDelta is a change of a page.
type decodedDelta struct {
	acked   []run
	retries []retryAt
}

func decodeDelta(r Record) (decodedDelta, error) {
	d := unseal(r)
	var out decodedDelta
	n := d.uvarint(pageSize)
	at := 0
	for range n {
		first := at + int(d.uvarint(pageMask))
		last := first + int(d.uvarint(pageMask))
		if last > pageMask || at > 0 && first == at {
			d.fail(errOrder)
		}
		if d.err != nil {
			return decodedDelta{}, d.err
		}
		out.acked = append(out.acked, run{uint16(first), uint16(last)})
		at = last + 1
	}
	out.retries = d.retries()
	return out, d.end()
}

// decodedPage is a page as written.
type decodedPage struct {
	seq     uint64
	acked   pageSet
	retries []retryAt
}

func decodePage(r Record) (decodedPage, error) {
	d := unseal(r)
	var out decodedPage
	form := d.byte()
	out.seq = d.uvarint(1<<64 - 1)
	at := -2 // last index so far; runs must not touch
	add := func(first, last int) {
		out.acked.add(first, last)
		at = last
	}
	switch form {
	case formRuns:
		for range d.uvarint(maxRuns) {
			first, last := int(d.uint16()), int(d.uint16())
			if d.err == nil && (first < at+2 && at >= 0 || last < first) {
				d.fail(errOrder)
			}
			if d.err != nil {
				return decodedPage{}, d.err
			}
			add(first, last)
		}
	case formArray:
		for range d.uvarint(pageSize / 16) {
			i := int(d.uint16())
			if d.err == nil && i <= at {
				d.fail(errOrder)
			}
			if d.err != nil {
				return decodedPage{}, d.err
			}
			add(i, i)
		}
	case formBitmap:
		words := d.next(bitmapBytes)
		if d.err == nil {
			out.acked.fromWords(words)
		}
	default:
		d.fail(fmt.Errorf("form %d of a page is not known here", form))
	}
	out.retries = d.retries()
	return out, d.end()
}
