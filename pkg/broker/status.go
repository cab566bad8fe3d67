package broker

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/chain"
	"github.com/penstock-mq/penstock/pkg/cursor"
	"github.com/penstock-mq/penstock/pkg/dispatch"
	"github.com/penstock-mq/penstock/pkg/entry"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/ledger"
	"github.com/penstock-mq/penstock/pkg/meta"
	"github.com/penstock-mq/penstock/pkg/statelog"
	"github.com/penstock-mq/penstock/pkg/subscription"
	"github.com/penstock-mq/penstock/pkg/topic"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// movedError says that a topic is, or is about to be, served elsewhere.
type movedError struct {
	topic  string
	bundle meta.BundleID
	url    string // "" is not known
	epoch  entry.Epoch
}

// Error says who to ask.
func (e *movedError) Error() string {
	if e.url == "" {
		return fmt.Sprintf("topic %s (bundle %s) is not served by this broker, and it is not known yet by which: look it up again", e.topic, e.bundle)
	}
	return fmt.Sprintf("topic %s (bundle %s) is served by %s", e.topic, e.bundle, e.url)
}

func (e *movedError) wire() *brokerv1.Moved {
	return &brokerv1.Moved{BrokerUrl: e.url, Bundle: string(e.bundle), Epoch: uint64(e.epoch)}
}

// refusal is an error of the broker's own making, with its code.
type refusal struct {
	code brokerv1.Code
	text string
}

// Error returns the text.
func (e *refusal) Error() string { return e.text }

func refuse(code brokerv1.Code, format string, args ...any) error {
	return &refusal{code: code, text: fmt.Sprintf(format, args...)}
}

func invalid(format string, args ...any) error {
	return refuse(brokerv1.Code_CODE_INVALID, format, args...)
}

// codeOf classifies an error; the one place that does.
func codeOf(err error) (code brokerv1.Code, retryable bool) {
	var (
		own      *refusal
		refused  *subscription.Error
		moved    *movedError
		badName  *topicname.Error
		badFrame *frame.Error
		busy     *dispatch.BusyError
		corrupt  *cursor.CorruptError
		damaged  *statelog.DamagedError
		missing  *statelog.UnreadableError
		few      *chain.NotEnoughBookiesError
		add      *ledger.AppendError
	)
	switch {
	case errors.As(err, &own):
		return own.code, passing(own.code)
	case errors.As(err, &refused):
		code = refusalCodes[refused.Reason]
		return code, passing(code)
	case errors.As(err, &moved):
		return brokerv1.Code_CODE_NOT_OWNER, true
	case errors.As(err, &badName), errors.As(err, &badFrame), errors.Is(err, meta.ErrInvalid),
		errors.Is(err, cursor.ErrBeyondEnd), errors.Is(err, topic.ErrSequenceOverlap):
		return brokerv1.Code_CODE_INVALID, false
	case errors.As(err, &busy), errors.Is(err, meta.ErrExists):
		return brokerv1.Code_CODE_CONFLICT, false
	case errors.Is(err, cursor.ErrStaleGeneration):
		return brokerv1.Code_CODE_SUBSCRIPTION_MOVED, false
	case errors.As(err, &corrupt), errors.As(err, &damaged):
		return brokerv1.Code_CODE_INTERNAL, false
	case errors.Is(err, topic.ErrProducerFenced):
		return brokerv1.Code_CODE_FENCED, false
	case errors.As(err, &missing), errors.As(err, &few), errors.Is(err, topic.ErrProducerReplaced), errors.Is(err, topic.ErrSequenceGap), errors.Is(err, topic.ErrUnavailable):
		return brokerv1.Code_CODE_UNAVAILABLE, true
	case errors.Is(err, topic.ErrCopiesUnknown): // it stays so, however often it is sent
		return brokerv1.Code_CODE_OUTCOME_UNKNOWN, false
	case errors.As(err, &add):
		if add.Outcome == ledger.Unknown {
			return brokerv1.Code_CODE_OUTCOME_UNKNOWN, true
		}
		return brokerv1.Code_CODE_UNAVAILABLE, true
	case errors.Is(err, meta.ErrUnknownOutcome):
		return brokerv1.Code_CODE_OUTCOME_UNKNOWN, true
	case errors.Is(err, meta.ErrEpoch), errors.Is(err, chain.ErrLost):
		return brokerv1.Code_CODE_NOT_OWNER, true
	case errors.Is(err, meta.ErrNotFound), errors.Is(err, chain.ErrTrimmed):
		return brokerv1.Code_CODE_NOT_FOUND, false
	case errors.Is(err, meta.ErrNotEmpty), errors.Is(err, meta.ErrDeleting), errors.Is(err, cursor.ErrDeleted):
		return brokerv1.Code_CODE_REFUSED, false
	case errors.Is(err, meta.ErrUnavailable), errors.Is(err, meta.ErrConflict), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, context.Canceled), errors.Is(err, topic.ErrClosed), errors.Is(err, chain.ErrClosed),
		errors.Is(err, statelog.ErrClosed), errors.Is(err, dispatch.ErrClosed):
		return brokerv1.Code_CODE_UNAVAILABLE, true
	}
	return brokerv1.Code_CODE_INTERNAL, true
}

// passing tells of a refusal whether it may be worth while to come again.
func passing(c brokerv1.Code) bool {
	return c == brokerv1.Code_CODE_UNAVAILABLE || c == brokerv1.Code_CODE_OVERLOADED || c == brokerv1.Code_CODE_SUBSCRIPTION_MOVED
}

// wireError is what a stream tells a client of an error.
func wireError(err error) *brokerv1.Error {
	code, retryable := codeOf(err)
	return &brokerv1.Error{Code: code, Message: err.Error(), Retryable: retryable}
}

var grpcCodes = map[brokerv1.Code]codes.Code{
	brokerv1.Code_CODE_INVALID:          codes.InvalidArgument,
	brokerv1.Code_CODE_NOT_FOUND:        codes.NotFound,
	brokerv1.Code_CODE_CONFLICT:         codes.AlreadyExists,
	brokerv1.Code_CODE_OVERLOADED:       codes.ResourceExhausted,
	brokerv1.Code_CODE_UNAVAILABLE:      codes.Unavailable,
	brokerv1.Code_CODE_NOT_OWNER:        codes.FailedPrecondition,
	brokerv1.Code_CODE_OUTCOME_UNKNOWN:  codes.Unknown,
	brokerv1.Code_CODE_FENCED:           codes.Aborted,
	brokerv1.Code_CODE_BACKLOG_EXCEEDED: codes.ResourceExhausted,
	brokerv1.Code_CODE_INTERNAL:         codes.Internal,
	brokerv1.Code_CODE_DENIED:           codes.PermissionDenied,
	brokerv1.Code_CODE_REFUSED:          codes.FailedPrecondition,

	brokerv1.Code_CODE_SUBSCRIPTION_MOVED: codes.Aborted,
}

// statusError turns an error into a gRPC status that carries our own code, and where to go, as details. nil stays nil.
func statusError(err error) error {
	if err == nil {
		return nil
	}
	wire := wireError(err)
	s := status.New(grpcCodes[wire.GetCode()], wire.GetMessage())
	detailed, detailErr := s.WithDetails(wire)
	if detailErr != nil {
		panic(fmt.Sprintf("broker: attach details to status: %v", detailErr)) // a message of our own always marshals
	}
	var moved *movedError
	if errors.As(err, &moved) {
		if detailed, detailErr = detailed.WithDetails(moved.wire()); detailErr != nil {
			panic(fmt.Sprintf("broker: attach details to status: %v", detailErr))
		}
	}
	return detailed.Err()
}
