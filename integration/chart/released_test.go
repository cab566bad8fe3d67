package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// changeable are the fields of a StatefulSet's spec that the API lets one change.
var changeable = []string{
	"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "persistentVolumeClaimRetentionPolicy", "minReadySeconds",
}

// fixed is what must not change of an object: because the API refuses it, because data would be left behind, or because pods that
// run would no longer be found.
func fixed(o *object) map[string]any {
	out := map[string]any{}
	spec, _ := o.raw["spec"].(map[string]any)
	switch o.Kind {
	case "StatefulSet":
		for field, value := range spec {
			if !slices.Contains(changeable, field) {
				out[field] = value
			}
		}
		c := o.Spec.Template.Spec.Containers[0]
		for _, m := range c.VolumeMounts {
			if m.Name == "data" {
				out["mount"] = m.MountPath
			}
		}
		// Who a pod is, and where below the mount its data lies.
		for _, arg := range c.Args {
			flag, value, _ := strings.Cut(arg, "=")
			switch flag {
			case "--data-dir", "--name", "--initial-cluster", "--initial-advertise-peer-urls":
				out[flag] = value
			}
		}
	case "ConfigMap":
		for file, text := range o.Data {
			if id := regexp.MustCompile(`(?m)^bookie-id: .*$`).FindString(text); id != "" {
				out[file] = id
			}
		}
	case "Deployment":
		out["selector"] = spec["selector"]
	case "Service":
		out["clusterIP"], out["type"] = spec["clusterIP"], spec["type"]
	}
	return out
}

// An upgrade from the last release does not fail on an immutable field, and finds the data.
func TestNothingImmutableChanges(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join("testdata", "released", name+".yaml")
			if *update {
				text, err := template(t, "helm4", "--values", valuesFile(name))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			now := render(t, name)
			if diff := changes(parse(t, string(text)), now); len(diff) > 0 {
				t.Errorf("since the last release:\n%s", strings.Join(diff, "\n"))
			}
		})
	}
}

// changes lists what is fixed and has changed.
func changes(before, now []*object) []string {
	var out []string
	for _, old := range before {
		i := slices.IndexFunc(now, func(o *object) bool { return o.String() == old.String() })
		if i < 0 {
			if old.Kind == "StatefulSet" {
				out = append(out, fmt.Sprintf("%v is gone, and its pods would leave their volumes", old))
			}
			continue
		}
		was, is := fixed(old), fixed(now[i])
		for field := range was {
			if !reflect.DeepEqual(was[field], is[field]) {
				out = append(out, fmt.Sprintf("%v: %s was %v and is %v", old, field, was[field], is[field]))
			}
		}
		for field := range is {
			if _, had := was[field]; !had {
				out = append(out, fmt.Sprintf("%v: %s is new", old, field))
			}
		}
	}
	return out
}

// The comparison sees what it is there for.
func TestChangesAreSeen(t *testing.T) {
	t.Parallel()
	text, err := template(t, "helm4")
	if err != nil {
		t.Fatal(err)
	}
	before := parse(t, text)
	for was, is := range map[string]string{
		"name: penstock-etcd\n":                                    "name: penstock-meta\n",
		"podManagementPolicy: Parallel":                            "podManagementPolicy: OrderedReady",
		"storage: 100Gi":                                           "storage: 200Gi",
		"accessModes: [ReadWriteOnce]":                             "accessModes: [ReadWriteOncePod]",
		"serviceName: penstock-bookie":                             "serviceName: penstock-bookies",
		"--data-dir=/var/lib/penstock/bookie":                      "--data-dir=/var/lib/penstock/data",
		"bookie-id: penstock-bookie-1":                             "bookie-id: bookie-1",
		"mountPath: /var/lib/etcd":                                 "mountPath: /var/lib",
		"clusterIP: None":                                          "clusterIP: 10.0.0.1",
		"        name: data\n      spec:\n":                        "        name: data\n        labels: {v: \"2\"}\n      spec:\n",
		"        app.kubernetes.io/component: broker\n  template:": "        app.kubernetes.io/component: brokers\n  template:",
		"      app.kubernetes.io/component: broker\n  template:":   "      app.kubernetes.io/component: brokers\n  template:",
	} {
		broken := strings.ReplaceAll(text, was, is)
		if seen := changes(before, parse(t, broken)); (broken != text) != (len(seen) > 0) {
			t.Errorf("%q in place of %q: %v", is, was, seen)
		}
	}
	if seen := changes(before, parse(t, strings.ReplaceAll(text, "replicas: 3", "replicas: 5"))); len(seen) > 0 {
		t.Errorf("more replicas: %v", seen)
	}
}
