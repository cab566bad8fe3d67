package segment

import (
	"errors"
	"fmt"
	"io"
)

// What a CorruptError says was being read.
const (
	whatHeader = "header"
	whatBatch  = "batch"
	whatRecord = "record"
	whatBody   = "body"
	whatFooter = "footer"
)

// errDamaged marks bytes that do not decode; callers that know the place make it a CorruptError.
var errDamaged = errors.New("damaged")

// readError makes of a failed read an error of the segment: a file that ends too early is damaged, anything else
// is the disk's.
func readError(err error, path string, offset int64, what string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &CorruptError{Path: path, Offset: offset, What: what}
	}
	return fmt.Errorf("read %s at %d of %s: %w", what, offset, path, err)
}
