package bookie

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/bookiewire"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// Cookie is what a data directory says about itself.
type Cookie struct {
	Identity
	Created time.Time
}

const (
	cookieVersion = 1
	cookieFixed   = 52
	maxCookie     = cookieFixed + bookiewire.MaxBookieID + 4
)

var cookieMagic = [8]byte{'P', 'N', 'S', 'T', 'C', 'O', 'O', 'K'}

// errCookie is returned (wrapped) for bytes that are no cookie.
var errCookie = errors.New("cookie is damaged")

// encodeCookie returns the bytes of the file.
func encodeCookie(c Cookie) ([]byte, error) {
	if len(c.ID) == 0 || len(c.ID) > bookiewire.MaxBookieID {
		return nil, fmt.Errorf("encode cookie: bookie id of %d bytes, want 1 to %d", len(c.ID), bookiewire.MaxBookieID)
	}
	b := append([]byte{}, cookieMagic[:]...)
	b = binary.BigEndian.AppendUint16(b, cookieVersion)
	b = append(b, byte(len(c.ID)), 0)
	b = append(b, c.Cluster[:]...)
	b = append(b, c.Storage[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(c.Created.UnixMilli()))
	b = append(b, c.ID...)
	return binary.BigEndian.AppendUint32(b, entry.CRC32C(b)), nil
}

// decodeCookie reads the whole file.
func decodeCookie(b []byte) (Cookie, error) {
	damaged := func(why string) (Cookie, error) { return Cookie{}, fmt.Errorf("%w: %s", errCookie, why) }
	switch {
	case len(b) < cookieFixed+4 || len(b) > maxCookie:
		return damaged(fmt.Sprintf("%d bytes", len(b)))
	case [8]byte(b[:8]) != cookieMagic:
		return damaged("wrong magic")
	case entry.CRC32C(b[:len(b)-4]) != binary.BigEndian.Uint32(b[len(b)-4:]):
		return damaged("wrong checksum")
	case binary.BigEndian.Uint16(b[8:]) != cookieVersion:
		return damaged(fmt.Sprintf("version %d is not known to this program", binary.BigEndian.Uint16(b[8:])))
	case len(b) != cookieFixed+int(b[10])+4 || b[10] == 0:
		return damaged("wrong length")
	}
	return Cookie{
		Identity: Identity{
			Cluster: entry.UUID(b[12:28]),
			Storage: entry.StorageUUID(b[28:44]),
			ID:      string(b[cookieFixed : len(b)-4]),
		},
		Created: time.UnixMilli(int64(binary.BigEndian.Uint64(b[44:]))),
	}, nil
}
