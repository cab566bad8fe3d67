package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// Code classifies an [Error] for the program that meets it.
type Code int32

// The codes. Those below 100 are the brokers'.
const (
	// CodeUnknown: nothing is known of the failure's kind.
	CodeUnknown Code = 0
	// CodeInvalid: the request is malformed or breaks a limit.
	CodeInvalid Code = 1
	// CodeNotFound: the topic, subscription or namespace does not exist.
	CodeNotFound Code = 2
	// CodeConflict: the thing exists already, or an exclusive place is taken.
	CodeConflict Code = 3
	// CodeOverloaded: the broker is out of some budget for now.
	CodeOverloaded Code = 4
	// CodeUnavailable: no broker, or not enough bookies, for now.
	CodeUnavailable Code = 5
	// CodeNotOwner: another broker serves the topic. The client follows by itself.
	CodeNotOwner Code = 6
	// CodeOutcomeUnknown: sent, but not confirmed when the wait ended; see [OutcomeUnknown].
	CodeOutcomeUnknown Code = 7
	// CodeFenced: a producer of the same name took over.
	CodeFenced Code = 8
	// CodeBacklogExceeded: a subscription's backlog is over its quota.
	CodeBacklogExceeded Code = 9
	// CodeInternal: the broker met a fault of its own.
	CodeInternal Code = 10
	// CodeDenied: the caller may not do this.
	CodeDenied Code = 11
	// CodeRefused: a safety check refused.
	CodeRefused Code = 12
	// CodeSubscriptionMoved: a seek moved the subscription; what was delivered before cannot be acknowledged.
	CodeSubscriptionMoved Code = 13
	// CodeTimeout: the context ended first; nothing was done.
	CodeTimeout Code = 100
	// CodeClosed: the client, producer or consumer is closed.
	CodeClosed Code = 101
)

// String names the code as messages print it.
func (c Code) String() string {
	switch c {
	case CodeUnknown:
		return "unknown"
	case CodeTimeout:
		return "timeout"
	case CodeClosed:
		return "closed"
	case CodeInvalid, CodeNotFound, CodeConflict, CodeOverloaded, CodeUnavailable, CodeNotOwner, CodeOutcomeUnknown,
		CodeFenced, CodeBacklogExceeded, CodeInternal, CodeDenied, CodeRefused, CodeSubscriptionMoved:
		name := strings.TrimPrefix(brokerv1.Code(c).String(), "CODE_")
		return strings.ReplaceAll(strings.ToLower(name), "_", " ")
	}
	return fmt.Sprintf("Code(%d)", int32(c))
}

// Error is what every call of this package returns when it fails.
type Error struct {
	// Code is the kind of failure.
	Code Code
	// Op is what was tried: "publish", "subscribe", …
	Op string
	// Topic is the topic or partition, Broker the URL of the broker that was asked; either may be empty.
	Topic, Broker string
	// Retryable tells whether the same call may succeed later.
	Retryable bool
	// Err is the cause. With CodeTimeout and CodeOutcomeUnknown it wraps the context's error.
	Err error

	moved *brokerv1.Moved
}

// Error says what was tried, on what, and why it failed.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.Topic != "" {
		b.WriteString(" " + quoted(e.Topic))
	}
	if e.Broker != "" {
		b.WriteString(" at " + e.Broker)
	}
	b.WriteString(": " + e.Code.String())
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

// quoted puts quotes around a name that is not plain text, so that an error stays one line whatever was asked for.
func quoted(name string) string {
	if q := strconv.Quote(name); q[1:len(q)-1] != name || strings.Contains(name, " ") {
		return q
	}
	return name
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// OutcomeUnknown reports whether err says that a message, an acknowledgement or a change was sent but neither
// confirmed nor refused: it may have taken effect or not. Publishing the message again may store it twice,
// unless the producer deduplicates and the message carries the same sequence id.
func OutcomeUnknown(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == CodeOutcomeUnknown
}

// asError returns the *Error inside err, for whoever decides by code.
func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: CodeUnknown, Op: "call", Retryable: true, Err: err}
}

func timeoutError(op, topic string, cause error) *Error {
	return &Error{Code: CodeTimeout, Op: op, Topic: topic, Retryable: true, Err: cause}
}

// gaveUp tells what a wait that the context ended was waiting for.
func gaveUp(op, topic string, cause, last error) *Error {
	if last != nil {
		cause = fmt.Errorf("%w; last attempt: %w", cause, last)
	}
	return timeoutError(op, topic, cause)
}

func closedError(op, topic string) *Error {
	return &Error{Code: CodeClosed, Op: op, Topic: topic, Err: errors.New("already closed")}
}

func invalidError(op, topic, format string, args ...any) *Error {
	return &Error{Code: CodeInvalid, Op: op, Topic: topic, Err: fmt.Errorf(format, args...)}
}

// unknownOutcome turns the reason why waiting ended into the error of something that was sent.
func unknownOutcome(op, topic string, cause error) *Error {
	return &Error{Code: CodeOutcomeUnknown, Op: op, Topic: topic, Retryable: true, Err: cause}
}

// fromWire converts a broker's error message.
func fromWire(op, topic, broker string, w *brokerv1.Error) *Error {
	code := Code(w.GetCode())
	retryable := w.GetRetryable()
	switch code {
	case CodeOverloaded, CodeUnavailable, CodeNotOwner, CodeInternal:
		retryable = true
	default:
	}
	return &Error{Code: code, Op: op, Topic: topic, Broker: broker, Retryable: retryable, Err: errors.New(w.GetMessage())}
}

// fromMoved makes an error of a Moved message.
func fromMoved(op, topic, broker string, m *brokerv1.Moved) *Error {
	return &Error{
		Code: CodeNotOwner, Op: op, Topic: topic, Broker: broker, Retryable: true, moved: m,
		Err: fmt.Errorf("moved to %q, epoch %d", m.GetBrokerUrl(), m.GetEpoch()),
	}
}

// fromStatus converts an error of gRPC: by the details a broker put in it, else by its status code.
func fromStatus(op, topic, broker string, err error) *Error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e
	}
	s, ok := status.FromError(err)
	if !ok {
		return &Error{Code: CodeUnavailable, Op: op, Topic: topic, Broker: broker, Retryable: true, Err: err}
	}
	var out *Error
	var moved *brokerv1.Moved
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *brokerv1.Error:
			out = fromWire(op, topic, broker, d)
		case *brokerv1.Moved:
			moved = d
		}
	}
	if out == nil {
		code, retryable := codeOf(s.Code())
		out = &Error{Code: code, Op: op, Topic: topic, Broker: broker, Retryable: retryable, Err: errors.New(s.Message())}
	}
	if moved != nil {
		out.Code, out.Retryable, out.moved = CodeNotOwner, true, moved
	}
	return out
}

func codeOf(c codes.Code) (Code, bool) {
	switch c {
	case codes.InvalidArgument, codes.OutOfRange, codes.Unimplemented:
		return CodeInvalid, false
	case codes.NotFound:
		return CodeNotFound, false
	case codes.AlreadyExists:
		return CodeConflict, false
	case codes.PermissionDenied, codes.Unauthenticated:
		return CodeDenied, false
	case codes.FailedPrecondition:
		return CodeRefused, false
	case codes.ResourceExhausted:
		return CodeOverloaded, true
	case codes.Internal, codes.DataLoss:
		return CodeInternal, true
	default: // Unavailable, Canceled, DeadlineExceeded, Aborted, Unknown, and the end of a stream
		return CodeUnavailable, true
	}
}

func causeOf(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return context.Canceled
}
