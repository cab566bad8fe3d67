package broker

import (
	"testing"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
)

// A producer that comes while the topic is being closed is told, and holds up nobody: neither itself nor the topic's end.
func TestAttachToATopicThatStops(t *testing.T) {
	t.Parallel()
	topic := &servedTopic{stopped: true, deleted: true, producers: map[*publisher]struct{}{}}
	if code, _ := codeOf(topic.attach(&publisher{})); code != brokerv1.Code_CODE_NOT_FOUND {
		t.Fatal(code)
	}
	if !topic.mu.TryLock() {
		t.Fatal("the topic is still locked")
	}
}
