package meta

import (
	"fmt"
	"math"
	"strings"
	"time"

	metav1 "github.com/penstock-mq/penstock/api/penstock/meta/v1"
	"github.com/penstock-mq/penstock/pkg/topicname"
)

func encodeBroker(b BrokerInfo) (string, error) {
	return encode(&metav1.Broker{
		Id: b.ID, Url: b.URL, Http: b.HTTP, Peer: b.Peer, Version: b.Version, StartedMs: millis(b.Started),
	})
}

func decodeBroker(key string, value []byte) (BrokerInfo, error) {
	var m metav1.Broker
	if err := decode(key, value, &m); err != nil {
		return BrokerInfo{}, err
	}
	if m.Id == "" || !strings.HasSuffix(key, "/"+m.Id) {
		return BrokerInfo{}, corrupt(key, "it names broker %q", m.Id)
	}
	return BrokerInfo{
		ID: m.Id, URL: m.Url, HTTP: m.Http, Peer: m.Peer, Version: m.Version, Started: fromMillis(m.StartedMs),
	}, nil
}

func encodeBookie(b BookieInfo) (string, error) {
	return encode(&metav1.Bookie{
		Id: b.ID, Storage: b.UUID[:], State: metav1.BookieState(b.State), Draining: b.Draining,
		Data: b.Data, Grpc: b.GRPC, Http: b.HTTP, Zone: b.Zone, Host: b.Host,
		FreeBytes: b.FreeBytes, TotalBytes: b.TotalBytes, Sync: b.Sync, Version: b.Version, StartedMs: millis(b.Started),
	})
}

func decodeBookie(key string, value []byte) (BookieInfo, error) {
	var m metav1.Bookie
	if err := decode(key, value, &m); err != nil {
		return BookieInfo{}, err
	}
	u, err := decodeUUID(m.Storage)
	if err != nil {
		return BookieInfo{}, &CorruptRecordError{Key: key, Err: err}
	}
	if m.State < 0 || m.State > metav1.BookieState(BookieFull) || !strings.HasSuffix(key, "/"+hexUUID(u)) {
		return BookieInfo{}, corrupt(key, "state %d of %s", m.State, u)
	}
	return BookieInfo{
		ID: m.Id, UUID: u, State: BookieState(m.State), Draining: m.Draining,
		Data: m.Data, GRPC: m.Grpc, HTTP: m.Http, Zone: m.Zone, Host: m.Host,
		FreeBytes: m.FreeBytes, TotalBytes: m.TotalBytes, Sync: m.Sync, Version: m.Version, Started: fromMillis(m.StartedMs),
	}, nil
}

func decodeCookie(key string, value []byte) (Cookie, error) {
	var m metav1.Cookie
	if err := decode(key, value, &m); err != nil {
		return Cookie{}, err
	}
	u, err := decodeUUID(m.Storage)
	if err != nil {
		return Cookie{}, &CorruptRecordError{Key: key, Err: err}
	}
	if m.Id == "" || !strings.HasSuffix(key, "/"+m.Id) {
		return Cookie{}, corrupt(key, "it names bookie %q", m.Id)
	}
	return Cookie{ID: m.Id, UUID: u, Created: fromMillis(m.CreatedMs), Starts: m.Starts}, nil
}

func encodeNamespace(ns Namespace, lastOp uint64) (string, error) {
	m := &metav1.Namespace{
		Policies: policiesToProto(ns.Policies), CreatedMs: millis(ns.Created), Deleting: ns.Deleting, LastOp: lastOp,
	}
	for _, b := range ns.Bundles {
		_, number, err := b.ID.Split()
		if err != nil {
			return "", err
		}
		m.Bundles = append(m.Bundles, &metav1.BundleRange{Number: number, Last: b.Last})
	}
	return encode(m)
}

func decodeNamespace(key, name string, value []byte, rev int64) (Namespace, uint64, error) {
	var m metav1.Namespace
	if err := decode(key, value, &m); err != nil {
		return Namespace{}, 0, err
	}
	policies, err := policiesFromProto(m.Policies)
	if err != nil {
		return Namespace{}, 0, &CorruptRecordError{Key: key, Err: err}
	}
	ns := Namespace{Name: name, Policies: policies, Deleting: m.Deleting, Created: fromMillis(m.CreatedMs), Rev: rev}
	next := uint64(0)
	for _, b := range m.Bundles {
		if uint64(b.Last) < next {
			return Namespace{}, 0, corrupt(key, "bundle %d ends before it begins", b.Number)
		}
		ns.Bundles = append(ns.Bundles, Bundle{ID: bundleID(name, b.Number), First: uint32(next), Last: b.Last})
		next = uint64(b.Last) + 1
	}
	if next != math.MaxUint32+1 {
		return Namespace{}, 0, corrupt(key, "its bundles do not cover every hash")
	}
	return ns, m.LastOp, nil
}

func encodeTopic(t Topic) (string, error) {
	return encode(&metav1.Topic{Uuid: t.UUID[:], Partitions: small(t.Partitions), Deleting: t.Deleting})
}

func decodeTopic(key, name string, value []byte, rev int64) (Topic, error) {
	var m metav1.Topic
	if err := decode(key, value, &m); err != nil {
		return Topic{}, err
	}
	u, err := decodeUUID(m.Uuid)
	if err != nil {
		return Topic{}, &CorruptRecordError{Key: key, Err: err}
	}
	if m.Partitions > topicname.MaxPartitions {
		return Topic{}, corrupt(key, "%d partitions", m.Partitions)
	}
	return Topic{Name: name, UUID: u, Partitions: int(m.Partitions), Deleting: m.Deleting, Rev: rev}, nil
}

func policiesToProto(p Policies) *metav1.Policies {
	m := &metav1.Policies{
		Ensemble: optional[uint32](p.Ensemble), WriteQuorum: optional[uint32](p.WriteQuorum),
		AckQuorum: optional[uint32](p.AckQuorum), MinZones: optional[uint32](p.MinZones),
		RetentionBytes: optional[uint64](p.RetentionBytes), BacklogBytes: optional[uint64](p.BacklogBytes),
		BacklogAction: metav1.BacklogAction(p.BacklogAction), AutoCreateTopics: clone(p.AutoCreateTopics),
		MaxUnackedPerSubscription: optional[uint32](p.MaxUnackedPerSubscription),
		MaxUnackedPerConsumer:     optional[uint32](p.MaxUnackedPerConsumer),
	}
	if p.RetentionTime != nil {
		ms := p.RetentionTime.Milliseconds()
		m.RetentionMs = &ms
	}
	if p.MessageTTL != nil {
		ms := p.MessageTTL.Milliseconds()
		m.MessageTtlMs = &ms
	}
	return m
}

func policiesFromProto(m *metav1.Policies) (Policies, error) {
	if m == nil {
		return Policies{}, nil
	}
	if m.BacklogAction < 0 || m.BacklogAction > metav1.BacklogAction(BacklogEvict) {
		return Policies{}, fmt.Errorf("backlog action %d", m.BacklogAction)
	}
	for _, ms := range []*int64{m.RetentionMs, m.MessageTtlMs} {
		if ms != nil && (*ms < 0 || *ms > math.MaxInt64/int64(time.Millisecond)) {
			return Policies{}, fmt.Errorf("a time of %d ms", *ms)
		}
	}
	p := Policies{
		Ensemble: optional[int](m.Ensemble), WriteQuorum: optional[int](m.WriteQuorum),
		AckQuorum: optional[int](m.AckQuorum), MinZones: optional[int](m.MinZones),
		RetentionBytes: optional[int64](m.RetentionBytes), BacklogBytes: optional[int64](m.BacklogBytes),
		BacklogAction: BacklogAction(m.BacklogAction), AutoCreateTopics: clone(m.AutoCreateTopics),
		MaxUnackedPerSubscription: optional[int](m.MaxUnackedPerSubscription),
		MaxUnackedPerConsumer:     optional[int](m.MaxUnackedPerConsumer),
	}
	if m.RetentionMs != nil {
		d := time.Duration(*m.RetentionMs) * time.Millisecond
		p.RetentionTime = &d
	}
	if m.MessageTtlMs != nil {
		d := time.Duration(*m.MessageTtlMs) * time.Millisecond
		p.MessageTTL = &d
	}
	if err := p.Validate(); err != nil {
		return Policies{}, err
	}
	return p, nil
}

// optional converts a number that may be absent.
func optional[To, From int | int64 | uint32 | uint64](v *From) *To {
	if v == nil {
		return nil
	}
	n := To(*v)
	return &n
}

func clone[T any](v *T) *T {
	if v == nil {
		return nil
	}
	c := *v
	return &c
}
