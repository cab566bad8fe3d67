package topicname_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/pkg/topicname"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"orders":                            "public/default/orders",
		"acme/eu/orders":                    "acme/eu/orders",
		"persistent://acme/eu/orders":       "acme/eu/orders",
		"orders-partition-0":                "public/default/orders-partition-0",
		"orders-partition-4095":             "public/default/orders-partition-4095",
		"a.b_c:d=e-f":                       "public/default/a.b_c:d=e-f",
		"persistent://a/b/c-partition-007":  "a/b/c-partition-007",
		"orders-partition-x":                "public/default/orders-partition-x",
		"orders-partition-4096":             "public/default/orders-partition-4096",
		"-partition-1":                      "public/default/-partition-1",
		"orders-partition--1":               "public/default/orders-partition--1",
		"orders-partition-9999999999999999": "public/default/orders-partition-9999999999999999",
	} {
		n, err := topicname.Parse(in)
		if err != nil || n.String() != want {
			t.Errorf("Parse(%q) = %q, %v; want %q", in, n, err, want)
		}
	}
	n, err := topicname.Parse("acme/eu/orders-partition-12")
	if err != nil || n.Partition != 12 || n.Base().String() != "acme/eu/orders" || n.NamespaceName() != "acme/eu" {
		t.Errorf("got %+v, %v", n, err)
	}
	if n, _ := topicname.Parse("orders-partition-012"); n.Partition != topicname.NoPartition {
		t.Errorf("a number with a leading zero is no partition, got %d", n.Partition)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for in, part := range map[string]string{
		"":                          "topic is empty",
		"a/b":                       "want topic or tenant/namespace/topic",
		"a/b/c/d":                   "want topic or tenant/namespace/topic",
		"a//c":                      "namespace is empty",
		"/b/c":                      "tenant is empty",
		"or ders":                   `contains ' '`,
		"or\x00ders":                `contains '\x00'`,
		"ördérs":                    `contains 'ö'`,
		"non-persistent://a/b/c":    "persistent://",
		"..":                        "can't be",
		strings.Repeat("x", 201):    "at most 200",
		strings.Repeat("x/", 99):    "want topic",
		"a-partition-1-partition-2": "two partition suffixes",
	} {
		_, err := topicname.Parse(in)
		var named *topicname.Error
		if !errors.As(err, &named) || !strings.Contains(err.Error(), part) {
			t.Errorf("Parse(%q): got %v, want an error that says %q", in, err, part)
		}
	}
	if _, _, err := topicname.ParseNamespace("acme"); err == nil {
		t.Error("a namespace needs a tenant")
	}
	if _, _, err := topicname.ParseNamespace("acme/e u"); err == nil {
		t.Error("a space in a namespace was accepted")
	}
	if tenant, ns, err := topicname.ParseNamespace(""); err != nil || tenant != "public" || ns != "default" {
		t.Errorf("empty namespace: got %q %q %v", tenant, ns, err)
	}
	if err := topicname.CheckTenant("a/b"); err == nil {
		t.Error("a slash in a tenant was accepted")
	}
	if err := topicname.CheckTenant("acme"); err != nil {
		t.Error(err)
	}
}

// Whatever parses prints as something that parses to the same, and no name escapes its part of a path.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"orders", "a/b/c", "persistent://a/b/c-partition-3", "../x", "a/b/..", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := topicname.Parse(s)
		if err != nil {
			return
		}
		again, err := topicname.Parse(n.String())
		if err != nil || again != n {
			t.Fatalf("%q: parsed %+v, printed %q, parsed again %+v, %v", s, n, n.String(), again, err)
		}
		if strings.Count(n.String(), "/") != 2 {
			t.Fatalf("%q: printed as %q", s, n)
		}
	})
}
