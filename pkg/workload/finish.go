package workload

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/entry"
)

// closeTimeout bounds the closing of a run whose context has ended.
const closeTimeout = time.Second

// Wait waits until everything is published and, with a subscription, read; it closes producers and consumers and returns
// what came out. When ctx ends first, it returns the report of what there was, with an error. Call it once.
func (r *Run) Wait(ctx context.Context) (Report, error) {
	err := r.finish(ctx)
	r.over()
	if err != nil {
		r.cancel() // nobody waits for the rest
		err = fmt.Errorf("finish workload: %w%s", err, r.trouble())
	}
	r.published.Wait()
	err = errors.Join(err, r.close(ctx))
	r.cancel()
	r.reading.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cfg.Subscription == "" {
		return r.book.summary(), err
	}
	return r.book.Judge(r.read, r.cfg.Dedup), err
}

// summary is the report of what was sent, where nothing was read.
func (b *Book) summary() Report {
	out := b.Judge(&Reading{book: b, producers: make([]producerReading, len(b.accounts))}, true)
	out.Violations = nil
	return out
}

func (r *Run) finish(ctx context.Context) error {
	settled := make(chan struct{})
	go func() {
		r.published.Wait()
		close(settled)
	}()
	select {
	case <-settled:
	case <-ctx.Done():
		return ctx.Err()
	}
	words, err := r.sayLastWords(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.lastWords = words
	r.checkComplete()
	r.mu.Unlock()
	r.over()
	if r.cfg.Subscription == "" {
		return nil
	}
	select {
	case <-r.complete:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("read to the end: %w", ctx.Err())
	}
}

// sayLastWords publishes the end of the run to each partition and returns where that stands.
func (r *Run) sayLastWords(ctx context.Context) (map[int]entry.Offset, error) {
	partitions, turn := 1, 0
	p, err := r.client.Producer(ctx, r.cfg.Topic, client.WithoutBatching(), client.WithRouter(func(_ *client.Message, n int) int {
		partitions = n
		return turn
	}))
	if err != nil {
		return nil, fmt.Errorf("end the run: %w", err)
	}
	words := make(map[int]entry.Offset)
	body := AppendBody(nil, Tag{Run: r.book.run, Producer: lastWord}, MinSize)
	for ; turn < partitions; turn++ {
		for {
			id, err := p.Publish(ctx, &client.Message{Value: body})
			if err == nil {
				words[id.Partition] = id.Offset
				break
			}
			var e *client.Error
			if ctx.Err() != nil || !errors.As(err, &e) || !e.Retryable {
				_ = p.Close(ctx)
				return nil, fmt.Errorf("end the run: %w", err)
			}
		}
	}
	if err := p.Close(ctx); err != nil {
		return nil, fmt.Errorf("end the run: %w", err)
	}
	return words, nil
}

// close closes what was opened.
func (r *Run) close(ctx context.Context) error {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
	}
	var err error
	for _, p := range r.producers {
		_ = p.Close(ctx) // what it could say was said by the receipts
	}
	for _, s := range r.consumers {
		err = errors.Join(err, s.Close(ctx))
	}
	if err != nil {
		return fmt.Errorf("close workload: %w", err)
	}
	return nil
}

// Ended tells whether everything published has its outcome and the end of the run was published after it, so that what
// is missing from a reading is not there.
func (r *Run) Ended() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastWords != nil
}

// over says that there will be no more last words than there are.
func (r *Run) over() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.ended:
	default:
		close(r.ended)
	}
}

// Reread reads the whole topic once more, from its oldest message to the end of the run, and judges that: what is stored,
// whatever was delivered. Call it after [Run.Wait].
func (r *Run) Reread(ctx context.Context) (Report, error) {
	r.mu.Lock()
	words := r.lastWords
	r.mu.Unlock()
	if words == nil {
		return Report{}, fmt.Errorf("read workload again: %w", errNoEnd)
	}
	from, err := r.client.Reader(ctx, r.cfg.Topic, client.Earliest())
	if err != nil {
		return Report{}, fmt.Errorf("read workload again: %w", err)
	}
	report, err := r.Follow(ctx, from.Receive)
	if closeErr := from.Close(ctx); err == nil && closeErr != nil {
		err = fmt.Errorf("read workload again: %w", closeErr)
	}
	return report, err
}

// errNoEnd is why something cannot be read to its end.
var errNoEnd = errors.New("the run has not ended")

// Follow reads, with next, until the end of the run, which may be still to come, and judges what next returned: messages by
// rising offsets, from the oldest that the reader is owed. A message may come again. When something fails, the report is
// of what there was.
func (r *Run) Follow(ctx context.Context, next func(context.Context) (*client.Delivery, error)) (Report, error) {
	r.mu.Lock()
	reading := r.book.NewReading(true)
	r.mu.Unlock()
	err := r.follow(ctx, reading, next)
	if err != nil {
		err = fmt.Errorf("read workload again: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.book.Judge(reading, r.cfg.Dedup), err
}

func (r *Run) follow(ctx context.Context, reading *Reading, next func(context.Context) (*client.Delivery, error)) error {
	for {
		d, err := next(ctx)
		if err != nil {
			return err
		}
		r.mu.Lock()
		tag := r.took(reading, d)
		r.mu.Unlock()
		if tag.Run == r.book.run && tag.Producer == lastWord { // there may be nothing behind it
			select {
			case <-r.ended:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		r.mu.Lock()
		done := r.lastWords != nil && reading.Complete(r.lastWords)
		r.mu.Unlock()
		select {
		case <-r.ended:
			if r.lastWords == nil { // set before ended was closed
				return errNoEnd
			}
		default:
		}
		if done {
			return nil
		}
	}
}
