// Package topicname reads and checks the names that people give to tenants, namespaces and topics.
//
//	name, err := topicname.Parse("orders-partition-3") // public/default/orders, partition 3
//	if err != nil {
//		return err // says which character, where, and what is allowed
//	}
//	name.String()        // "public/default/orders-partition-3"
//	name.Base().String() // "public/default/orders"
//	name.NamespaceName() // "public/default"
//
// Allowed are letters, digits and . _ : = - , as in Pulsar's tenants and namespaces.
package topicname

import (
	"fmt"
	"strconv"
	"strings"
)

// The defaults of a short name, and the limits of each part in bytes.
const (
	DefaultTenant    = "public"
	DefaultNamespace = "default"

	MaxTenant    = 64
	MaxNamespace = 64
	MaxTopic     = 200

	// MaxPartitions bounds the partitions of one topic.
	MaxPartitions = 4096
)

// NoPartition is the partition of a name that names a whole topic.
const NoPartition = -1

const (
	scheme          = "persistent://"
	partitionSuffix = "-partition-"
)

// Name is the name of a topic, or of one partition of it.
type Name struct {
	Tenant    string
	Namespace string
	Topic     string // without a partition suffix
	Partition int    // NoPartition for a whole topic
}

// Error says what is wrong with a name and what would be right.
type Error struct {
	Kind string // "topic", "namespace" or "tenant"
	Name string // as given
	Why  string
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("%s name %q: %s", e.Kind, e.Name, e.Why) }

// Parse reads "topic" or "tenant/namespace/topic", with an optional "persistent://" before and
// "-partition-N" after. It returns an [*Error].
func Parse(s string) (Name, error) {
	fail := func(why string) (Name, error) { return Name{}, &Error{Kind: "topic", Name: clip(s), Why: why} }
	rest := strings.TrimPrefix(s, scheme)
	if strings.Contains(rest, "://") {
		return fail("only the scheme persistent:// exists; leave it out or use that")
	}
	parts := strings.Split(rest, "/")
	n := Name{Tenant: DefaultTenant, Namespace: DefaultNamespace, Partition: NoPartition}
	switch len(parts) {
	case 1:
		n.Topic = parts[0]
	case 3:
		n.Tenant, n.Namespace, n.Topic = parts[0], parts[1], parts[2]
	default:
		return fail("want topic or tenant/namespace/topic")
	}
	if why := check(n.Tenant, "tenant", MaxTenant); why != "" {
		return fail(why)
	}
	if why := check(n.Namespace, "namespace", MaxNamespace); why != "" {
		return fail(why)
	}
	n.Topic, n.Partition = cutPartition(n.Topic)
	if _, again := cutPartition(n.Topic); again != NoPartition {
		return fail("a partition has no partitions: it ends in two partition suffixes")
	}
	if why := check(n.Topic, "topic", MaxTopic); why != "" {
		return fail(why)
	}
	return n, nil
}

// cutPartition splits "orders-partition-3" in two. A suffix that is not a canonical number below
// MaxPartitions is part of the topic's own name.
func cutPartition(topic string) (string, int) {
	at := strings.LastIndex(topic, partitionSuffix)
	if at <= 0 {
		return topic, NoPartition
	}
	digits := topic[at+len(partitionSuffix):]
	index, err := strconv.Atoi(digits)
	if err != nil || index < 0 || index >= MaxPartitions || strconv.Itoa(index) != digits {
		return topic, NoPartition
	}
	return topic[:at], index
}

// ParseNamespace reads "tenant/namespace"; empty means public/default. It returns an [*Error].
func ParseNamespace(s string) (tenant, namespace string, err error) {
	if s == "" {
		return DefaultTenant, DefaultNamespace, nil
	}
	tenant, namespace, ok := strings.Cut(s, "/")
	if !ok {
		return "", "", &Error{Kind: "namespace", Name: clip(s), Why: "want tenant/namespace"}
	}
	why := check(tenant, "tenant", MaxTenant)
	if why == "" {
		why = check(namespace, "namespace", MaxNamespace)
	}
	if why != "" {
		return "", "", &Error{Kind: "namespace", Name: clip(s), Why: why}
	}
	return tenant, namespace, nil
}

// CheckTenant returns nil for a valid tenant's name, or an [*Error].
func CheckTenant(s string) error {
	if why := check(s, "tenant", MaxTenant); why != "" {
		return &Error{Kind: "tenant", Name: clip(s), Why: why}
	}
	return nil
}

// String returns the full name, which Parse reads back.
func (n Name) String() string {
	s := n.Tenant + "/" + n.Namespace + "/" + n.Topic
	if n.Partition != NoPartition {
		s += partitionSuffix + strconv.Itoa(n.Partition)
	}
	return s
}

// NamespaceName returns "tenant/namespace".
func (n Name) NamespaceName() string { return n.Tenant + "/" + n.Namespace }

// Base returns the name of the whole topic.
func (n Name) Base() Name { return n.WithPartition(NoPartition) }

// WithPartition returns the name of partition index of the topic, or of the whole topic for NoPartition.
func (n Name) WithPartition(index int) Name {
	n.Partition = index
	return n
}

// check returns why s can't be the part of a name called what, or "".
func check(s, what string, limit int) string {
	switch {
	case s == "":
		return what + " is empty"
	case len(s) > limit:
		return fmt.Sprintf("%s has %d bytes, at most %d are allowed", what, len(s), limit)
	case s == "." || s == "..":
		return fmt.Sprintf("%s can't be %q", what, s)
	}
	for _, r := range s {
		if !allowed(r) {
			return fmt.Sprintf("%s contains %q; allowed are letters, digits and . _ : = -", what, r)
		}
	}
	return ""
}

func allowed(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return true
	}
	return strings.ContainsRune("._:=-", r)
}

// clip keeps an error short, whatever was sent as a name.
func clip(s string) string {
	const most = 100
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
