package bench

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestScenarioFile(t *testing.T) {
	t.Parallel()
	all, err := ReadScenarios(strings.NewReader(`
name: small
rate: 2000
in-flight: 1
batching: {messages: 1}
duration: 10s
---
topics: 10
subscriptions: 0
partitions: 4
keys: zipf
ack: all
warm-up: 0s
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Scenario{
		Name: "small", Topics: 1, Partitions: 1, Producers: 1, Subscriptions: 1, Consumers: 1, Size: 1024, Rate: 2000,
		InFlight: 1, KeyCount: 10_000, Batching: Batching{Messages: 1}, Keys: KeysNone, WarmUp: 5 * time.Second, Duration: 10 * time.Second,
	}
	if len(all) != 2 || all[0] != want {
		t.Fatalf("read %+v\nwant %+v", all, want)
	}
	if s := all[1]; s.Topics != 10 || s.KeyCount != 10_000 || s.Ack != AckAll || s.WarmUp != -1 || s.Subscriptions != -1 {
		t.Fatalf("read %+v", s)
	}
}

func TestBadScenarioSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"topic: 1":                            "field topic not found",
		"topics: -1":                          "topics is -1: want 1 to",
		"topics: 0":                           "topics is 0: want 1 to",
		"duration: 0s":                        "duration is 0s",
		"size: 5":                             "size is 5: want 28 to",
		"keys: some":                          `keys is "some": want none, in-turn, uniform or zipf`,
		"ack: two":                            `ack is "two": want none, one, quorum or all`,
		"live: true":                          "live says that publishing goes on while a backlog is consumed",
		"{backlog: 1, subscriptions: -1}":     "a backlog needs a subscription",
		"{size: 1000000, in-flight: 1000000}": "bytes of memory",
		"{topics: 1000, producers: 1000}":     "producers of all topics is 1000000",
		"rate: .nan":                          "rate is NaN",
		"":                                    "the file is empty",
		"topics: 1\n---\nsize: 1":             "read scenario 2: size is 1",
	} {
		if _, err := ReadScenarios(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func TestHeaderReadsBack(t *testing.T) {
	t.Parallel()
	value := make([]byte, headerSize)
	want := header{run: 1 << 63, producer: 7, number: 1 << 40, due: -5}
	m := Message{Value: value}
	m.stamp(want)
	if m.header != want {
		t.Fatalf("stamped %+v", m.header)
	}
	if got, ok := readHeader(value); !ok || got != want {
		t.Fatalf("read %+v, %v", got, ok)
	}
	if _, ok := readHeader(value[1:]); ok {
		t.Fatal("a value too short was taken for a message")
	}
}

// The scenarios of the documentation are scenarios.
func TestDocumentedScenarios(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/benchmarks.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "```yaml\n")
	example, _, found := strings.Cut(after, "```")
	all, err := ReadScenarios(strings.NewReader(example))
	if err != nil || !found || len(all) < 5 {
		t.Fatalf("%d scenarios: %v", len(all), err)
	}
}
