package client

import (
	"testing"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/pkg/frame"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

// TestDirectoryIgnoresOldNews: an owner that was replaced may go on saying that it owns.
func TestDirectoryIgnoresOldNews(t *testing.T) {
	t.Parallel()
	var d directory
	for _, c := range []struct {
		o    owner
		want bool
	}{
		{owner{"penstock://a:1", "b", 3}, true},
		{owner{"penstock://b:1", "b", 5}, true},
		{owner{"penstock://a:1", "b", 4}, false},
		{owner{"penstock://b:1", "b", 5}, true},
		{owner{"penstock://a:1", "other", 1}, true},
	} {
		if d.learn(c.o) != c.want {
			t.Errorf("learn %+v: want %v", c.o, c.want)
		}
	}
	d.answered("penstock://b:1")
	if got := d.candidates("penstock://b:1"); len(got) != 2 || got[1] != "penstock://b:1" || d.brokers[0] != "penstock://b:1" {
		t.Errorf("candidates %q", got)
	}
}

// TestDeliveryOfBeforeSeek: what a stream still brings after its subscription was moved is thrown away.
func TestDeliveryOfBeforeSeek(t *testing.T) {
	t.Parallel()
	c, err := Connect(t.Context(), "penstock://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	name, err := topicname.Parse("orders")
	if err != nil {
		t.Fatal(err)
	}
	consumer := &Consumer{c: c, cfg: defaultConsumerConfig(), filled: make(chan struct{}, 1)}
	s := newSubStream(consumer, name)
	entry := &brokerv1.DeliveredEntry{Span: 1, Frame: frame.Append(nil, &frame.Header{Producer: "p", Single: &frame.Message{}}, nil)}
	s.in.connected(0)
	st := &openSub{gen: s.in.streamGen}
	s.deliver(st, entry)
	if len(consumer.buffer) != 1 {
		t.Fatalf("%d buffered", len(consumer.buffer))
	}
	consumer.reset(s)
	s.deliver(st, entry)
	if it, ok := consumer.take(); ok {
		t.Fatalf("handed out %+v", it)
	}
}

func TestURLs(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"penstock://a:1":      "a:1",
		"penstock://a":        "a:7650",
		"penstock://a:":       "a:7650",
		"a:1":                 "a:1",
		"penstock://a:1/":     "a:1",
		"penstock://[::1]:5":  "[::1]:5",
		"penstock://[::1]":    "[::1]:7650",
		"http://a:1":          "",
		"penstock://":         "",
		"penstock://:1":       "",
		"penstock://u@a:1":    "",
		"penstock://a:1/path": "",
	} {
		if got, err := brokerAddr(in); got != want || (err != nil) != (want == "") {
			t.Errorf("brokerAddr(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
	if urls, err := bootstrapURLs("penstock://a:1, b,penstock://c:3"); err != nil || len(urls) != 3 || urls[1] != "penstock://b:7650" {
		t.Errorf("%q, %v", urls, err)
	}
	if _, err := bootstrapURLs(" , "); err == nil {
		t.Error("no broker is no error")
	}
}
