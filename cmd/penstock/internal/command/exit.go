package command

import (
	"context"
	"errors"
	"io/fs"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/bookie"
	"github.com/penstock-mq/penstock/pkg/broker"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/standalone"
)

// Exit codes, as documented in docs/cli.md.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitDenied      = 4
	exitRefused     = 5
	exitUnreachable = 6
	exitChanges     = 7
)

// exitCode maps an error to the code that scripts decide on.
func exitCode(err error) int {
	var usage *settings.UsageError
	var failed *client.Error
	var listen *broker.ListenError
	var identity *bookie.IdentityError
	var tooFew *standalone.TooFewBookiesError
	var interrupted *interruptedError
	var missing *missingError
	var unconfirmed *unconfirmedError
	var changes *changesError
	var refused *refusedError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &interrupted):
		return exitFailed
	case errors.As(err, &usage), errors.As(err, &listen):
		return exitUsage
	case errors.As(err, &missing), errors.Is(err, fs.ErrNotExist):
		return exitNotFound
	case errors.As(err, &changes):
		return exitChanges
	case errors.As(err, &identity), errors.As(err, &tooFew), errors.As(err, &refused):
		return exitRefused
	case errors.As(err, &unconfirmed):
		return exitUnreachable
	case errors.As(err, &failed):
		return exitCodeOf(failed)
	case errors.Is(err, context.DeadlineExceeded):
		return exitUnreachable
	}
	return exitFailed
}

// missingError says that something which was named does not exist.
type missingError struct{ text string }

func (e *missingError) Error() string { return e.text }

func exitCodeOf(err *client.Error) int {
	switch err.Code {
	case client.CodeInvalid:
		return exitUsage
	case client.CodeNotFound:
		return exitNotFound
	case client.CodeDenied:
		return exitDenied
	case client.CodeRefused:
		return exitRefused
	case client.CodeUnavailable, client.CodeNotOwner, client.CodeOverloaded, client.CodeTimeout:
		return exitUnreachable
	default:
		return exitFailed
	}
}
