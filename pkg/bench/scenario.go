package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Scenario is a workload. Zero fields have the defaults that [Scenario.WithDefaults] gives; in a file, 0 is 0.
type Scenario struct {
	// Name stands in results.
	Name string `yaml:"name" json:"name,omitempty"`
	// Topics is their number. Default: 1.
	Topics int `yaml:"topics" json:"topics"`
	// Partitions is their number in each topic. Default: 1, a plain topic.
	Partitions int `yaml:"partitions" json:"partitions"`
	// Producers is their number on each topic. Default: 1.
	Producers int `yaml:"producers" json:"producers"`
	// Subscriptions is their number on each topic: each gets every message. Default: 1; -1 is none.
	Subscriptions int `yaml:"subscriptions" json:"subscriptions"`
	// Consumers is their number in each subscription, which they share. Default: 1.
	Consumers int `yaml:"consumers" json:"consumers"`

	// Size of a message's value, in bytes, at least [MinSize]. Default: 1,024.
	Size int `yaml:"size" json:"size"`
	// Rate is how many messages a second are due, over all producers. 0: as fast as they are acknowledged.
	Rate float64 `yaml:"rate" json:"rate"`
	// InFlight is how many messages a producer has unanswered, at most; 1 is a synchronous publisher. Default: 10,000, and
	// fewer where all producers' would take more than 256 MiB.
	InFlight int `yaml:"in-flight" json:"inFlight"`
	// Batching of producers; zero fields are the driver's defaults.
	Batching Batching `yaml:"batching" json:"batching"`
	// Ack is what an acknowledgement means; empty is the driver's default.
	Ack AckLevel `yaml:"ack" json:"ack,omitempty"`
	// Keys says how messages are spread over keys. Default: [KeysNone].
	Keys KeyDistribution `yaml:"keys" json:"keys"`
	// KeyCount is the number of keys, where there are any. Default: 10,000.
	KeyCount int `yaml:"key-count" json:"keyCount,omitempty"`

	// WarmUp is how long the load runs before it is measured. Default: 5 s; below 0 is none.
	WarmUp time.Duration `yaml:"warm-up" json:"-"`
	// Duration is how long it is measured. Default: 30 s. A backlog is measured until it is consumed.
	Duration time.Duration `yaml:"duration" json:"-"`
	// Backlog is how many messages are published after the warm-up, at least, before the first of all is consumed. 0:
	// consumers run from the start.
	Backlog int64 `yaml:"backlog" json:"backlog,omitempty"`
	// Live has producers go on while a backlog is consumed.
	Live bool `yaml:"live" json:"live,omitempty"`
}

// MarshalJSON writes durations as text, as they stand in YAML.
func (s Scenario) MarshalJSON() ([]byte, error) {
	type plain Scenario
	s.Subscriptions = max(s.Subscriptions, 0)
	if s.Keys == KeysNone {
		s.KeyCount = 0
	}
	text, err := json.Marshal(struct {
		plain
		WarmUp   string `json:"warmUp"`
		Duration string `json:"duration"`
	}{plain(s), max(s.WarmUp, 0).String(), s.Duration.String()})
	if err != nil {
		return nil, fmt.Errorf("write scenario: %w", err)
	}
	return text, nil
}

// KeyDistribution says how messages are spread over keys.
type KeyDistribution string

// The distributions.
const (
	KeysNone    KeyDistribution = "none"    // no key: the driver spreads messages over partitions
	KeysInTurn  KeyDistribution = "in-turn" // one after the other
	KeysUniform KeyDistribution = "uniform" // at random, all alike
	KeysZipf    KeyDistribution = "zipf"    // at random, few of them often (exponent 1.1)
)

// MinSize is the least size of a message's value, which the engine's header takes.
const MinSize = headerSize

// WithDefaults returns the scenario with its zero fields filled.
func (s Scenario) WithDefaults() Scenario {
	fill(&s.Topics, 1)
	fill(&s.Partitions, 1)
	fill(&s.Producers, 1)
	fill(&s.Subscriptions, defaultSubscriptions)
	fill(&s.Consumers, 1)
	fill(&s.Size, 1024)
	if clients := max(1, s.Topics) * max(1, s.Producers); s.InFlight == 0 {
		s.InFlight = max(1, min(defaultInFlight, defaultMemory/clients/max(1, s.Size)))
	}
	fill(&s.Keys, KeysNone)
	if s.Keys != KeysNone {
		fill(&s.KeyCount, defaultKeyCount)
	}
	fill(&s.WarmUp, defaultWarmUp)
	fill(&s.Duration, 30*time.Second)
	return s
}

// exactly has zeros that a person wrote count, where the zero field would be the default.
func (s Scenario) exactly() Scenario {
	if s.Subscriptions == 0 {
		s.Subscriptions = -1
	}
	if s.WarmUp == 0 {
		s.WarmUp = -1
	}
	if s.InFlight == 0 {
		s.InFlight = s.WithDefaults().InFlight
	}
	return s
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Limits of a scenario, so that a slip of the finger is not an hour of memory filling.
const (
	maxTopics     = 1_000_000
	maxPartitions = 10_000
	maxClients    = 100_000 // producers, or consumers, of a run
	maxSize       = 64 << 20
	maxInFlight   = 1_000_000
	maxMemory     = 4 << 30 // of values in flight
	defaultMemory = 256 << 20

	defaultInFlight      = 10_000
	defaultSubscriptions = 1
	defaultKeyCount      = 10_000
	defaultWarmUp        = 5 * time.Second
	maxKeys              = 10_000_000
)

// Validate returns what is wrong with a scenario that has its defaults.
func (s Scenario) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	within := func(name string, value, low, high int64) {
		check(value >= low && value <= high, "%s is %d: want %d to %d", name, value, low, high)
	}
	within("topics", int64(s.Topics), 1, maxTopics)
	within("partitions", int64(s.Partitions), 1, maxPartitions)
	within("producers", int64(s.Producers), 1, maxClients)
	within("subscriptions", int64(s.Subscriptions), -1, maxClients)
	within("consumers", int64(s.Consumers), 1, maxClients)
	within("size", int64(s.Size), MinSize, maxSize)
	within("in-flight", int64(s.InFlight), 1, maxInFlight)
	check(s.Rate >= 0 && s.Rate <= 1e9, "rate is %v: want 0 (the highest) to 1e9 messages a second", s.Rate)
	check(s.Duration > 0, "duration is %v: want more than 0", s.Duration)
	check(s.Backlog >= 0, "backlog is %d: want 0 (none) or more", s.Backlog)
	check(!s.Live || s.Backlog > 0, "live says that publishing goes on while a backlog is consumed: there is none (backlog)")
	check(s.Backlog == 0 || s.Subscriptions > 0, "a backlog needs a subscription to consume it")
	check(s.Batching.Messages >= 0 && s.Batching.Bytes >= 0 && s.Batching.Delay >= 0, "batching is below 0")
	switch s.Ack {
	case "", AckNone, AckOne, AckQuorum, AckAll:
	default:
		check(false, "ack is %q: want none, one, quorum or all", s.Ack)
	}
	switch s.Keys {
	case KeysNone:
	case KeysInTurn, KeysUniform, KeysZipf:
		within("key-count", int64(s.KeyCount), 1, maxKeys)
	default:
		check(false, "keys is %q: want none, in-turn, uniform or zipf", s.Keys)
	}
	if len(errs) == 0 {
		clients := int64(s.Topics) * int64(s.Producers)
		within("producers of all topics", clients, 1, maxClients)
		within("consumers of all topics", int64(s.Topics)*int64(max(s.Subscriptions, 0))*int64(s.Consumers), 0, maxClients)
		if memory := clients * int64(s.InFlight) * int64(s.Size); memory > maxMemory {
			check(false, "%d producers × %d in flight × %d bytes are %d bytes of memory: want at most %d",
				clients, s.InFlight, s.Size, memory, int64(maxMemory))
		}
	}
	return oneLine(errs)
}

// oneLine joins errors as people read them.
func oneLine(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	texts := make([]string, len(errs))
	for i, err := range errs {
		texts[i] = err.Error()
	}
	return errors.New(strings.Join(texts, "; "))
}

// ReadScenarios reads a YAML file: a scenario, or several as documents. Unknown keys are errors. The scenarios have their
// defaults and are valid.
func ReadScenarios(in io.Reader) ([]Scenario, error) {
	text, err := io.ReadAll(io.LimitReader(in, maxScenarioFile+1))
	if err != nil {
		return nil, fmt.Errorf("read scenario: %w", err)
	}
	if len(text) > maxScenarioFile {
		return nil, fmt.Errorf("read scenario: more than %d bytes", maxScenarioFile)
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	var all []Scenario
	for {
		s := Scenario{KeyCount: defaultKeyCount}.WithDefaults()
		s.InFlight = 0 // it depends on the rest
		err := dec.Decode(&s)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read scenario %d: %w", len(all)+1, err)
		}
		s = s.exactly()
		if err := s.Validate(); err != nil {
			return nil, fmt.Errorf("read scenario %d: %w", len(all)+1, err)
		}
		all = append(all, s)
	}
	if len(all) == 0 {
		return nil, errors.New("read scenario: the file is empty")
	}
	return all, nil
}

const maxScenarioFile = 1 << 20
