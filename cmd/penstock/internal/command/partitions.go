package command

import (
	"context"
	"errors"
	"fmt"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/client"
)

// parts is what the calls about a topic's subscriptions have come to.
type parts struct {
	partitioned bool
	asked, done int // partitions
}

// eachPartition calls f for a topic, or for each partition of a topic that has partitions. A topic is asked first: its
// partitions are counted only when a broker refuses to take it for one log. Consumers that name a partition leave
// subscriptions that only some partitions have, so what a partition says is missing, or there already where asked for,
// fails the whole only if no partition says otherwise.
func eachPartition(ctx context.Context, c brokerv1.AdminClient, topic string, f func(topic string) error) (parts, error) {
	err := f(topic)
	if codeOf(err) != client.CodeInvalid {
		return parts{asked: 1, done: 1}, err
	}
	t, describeErr := c.DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: topic})
	if describeErr != nil || t.GetPartitions() == 0 {
		return parts{asked: 1}, err
	}
	p := parts{partitioned: true, asked: int(t.GetPartitions())}
	var without error
	for i := range p.asked {
		switch err := f(fmt.Sprintf("%s-partition-%d", t.GetTopic(), i)); codeOf(err) {
		case client.CodeNotFound, client.CodeConflict:
			without = err
		default:
			if err != nil {
				return p, fmt.Errorf("after %d of %d partitions: %w", p.done, p.asked, err)
			}
			p.done++
		}
	}
	if p.done == 0 {
		return p, without
	}
	return p, nil
}

// codeOf is the code of an error of the SDK, or 0.
func codeOf(err error) client.Code {
	var failed *client.Error
	if errors.As(err, &failed) {
		return failed.Code
	}
	return 0
}

// partitionOf is what a listing says of where a row comes from: nothing for a topic that is one log.
func (p parts) partitionOf(topic string) string {
	if p.partitioned {
		return topic
	}
	return ""
}
