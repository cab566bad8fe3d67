package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// chartsOwn are settings that follow from where a pod is, or from other values.
var chartsOwn = []string{
	"cluster", "etcd", "shutdown-timeout", "bookie-id", "broker-id", "data-dir", "listen", "grpc-listen", "http", "advertise", "zone", "host-label",
}

// printConfig returns the settings in force of a program with a command line.
func printConfig(t *testing.T, program string, args ...string) map[string]any {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), tool(t, program), append(args, "--print-config")...)
	cmd.Env = []string{}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", program, args, err, out)
	}
	var settings map[string]any
	if err := yaml.Unmarshal(out, &settings); err != nil {
		t.Fatal(err)
	}
	return settings
}

// The schema of the values names the programs' settings, all of them, of the right type.
func TestSettingsOfTheSchema(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	type property struct {
		Type, Ref  string
		Properties map[string]map[string]any
	}
	var schema struct {
		Properties map[string]struct{ Properties map[string]property }
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"bookie", "broker"} {
		known := schema.Properties[program].Properties["settings"].Properties
		is := printConfig(t, program)
		for name, value := range is {
			if slices.Contains(chartsOwn, name) {
				continue
			}
			want := map[string]any{}
			switch v := value.(type) {
			case int:
				want["type"] = "integer"
			case float64:
				want["$ref"] = "#/definitions/decimal"
			case bool:
				want["type"] = "boolean"
			case string:
				want["type"] = "string"
				if _, err := time.ParseDuration(v); err == nil {
					want = map[string]any{"$ref": "#/definitions/duration"}
				}
			}
			if fmt.Sprint(known[name]) != fmt.Sprint(want) {
				t.Errorf("%s.settings.%s is %v in values.schema.json, want %v", program, name, known[name], want)
			}
		}
		for name := range known {
			if _, is := is[name]; !is {
				t.Errorf("%s.settings.%s is in values.schema.json, and the program has no such setting", program, name)
			}
		}
	}
	helpers, err := os.ReadFile(filepath.Join(chartDir, "templates", "_helpers.tpl"))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf(`"ensemble" | default %v }}`, printConfig(t, "broker")["ensemble"]); !strings.Contains(string(helpers), want) {
		t.Errorf("the chart's default of ensemble is not the broker's: want %q in _helpers.tpl", want)
	}
}

// Whatever the values, the programs understand their command lines and settings files.
func TestCommandLines(t *testing.T) {
	t.Parallel()
	etcdHelp, err := exec.CommandContext(t.Context(), tool(t, "etcd"), "--help").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects := render(t, name)
			for _, o := range objects {
				if !o.workload() {
					continue
				}
				c := o.Spec.Template.Spec.Containers[0]
				if c.Name == "etcd" {
					for _, arg := range c.Args {
						if flag, _, _ := strings.Cut(arg, "="); !regexp.MustCompile(`(?m)^\s*` + flag + `\b`).Match(etcdHelp) {
							t.Errorf("etcd has no %s", flag)
						}
					}
					continue
				}
				p := &pod{name: o.Metadata.Name + "-0", node: "node-1", zone: "a", ip: "10.0.0.7"}
				args, file := p.args(&c), filepath.Join(t.TempDir(), "settings.yaml")
				config, ok := strings.CutPrefix(args[0], "--config=")
				settings := find(t, objects, "ConfigMap", o.Metadata.Name).Data[filepath.Base(config)]
				if !ok || settings == "" {
					t.Fatalf("%v reads %s, which there is not", o, args[0])
				}
				if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
					t.Fatal(err)
				}
				is := printConfig(t, c.Name, append(args, "--config="+file)...)
				id := p.name
				if name == "everything" && c.Name == "bookie" {
					id += "-disk-3"
				}
				if is[c.Name+"-id"] != id {
					t.Errorf("%v runs %v, want %s", o, is[c.Name+"-id"], id)
				}
				if grace := o.Spec.Template.Spec.TerminationGracePeriodSeconds; duration(t, is["shutdown-timeout"])+10*time.Second > time.Duration(grace)*time.Second {
					t.Errorf("%v is killed after %d s, and may take %v to stop", o, grace, is["shutdown-timeout"])
				}
				var values struct {
					Bookie, Broker struct{ Settings map[string]any }
				}
				text, err := os.ReadFile(valuesFile(name))
				if err != nil {
					t.Fatal(err)
				}
				if err := yaml.Unmarshal(text, &values); err != nil {
					t.Fatal(err)
				}
				for setting, want := range map[string]map[string]any{"bookie": values.Bookie.Settings, "broker": values.Broker.Settings}[c.Name] {
					if is, want := fmt.Sprint(is[setting]), fmt.Sprint(want); is != want && duration(t, is) != duration(t, want) {
						t.Errorf("%s.settings.%s is %v and arrives as %v", c.Name, setting, want, is)
					}
				}
			}
		})
	}
}

// duration parses a setting; what is none is 0.
func duration(t *testing.T, v any) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(fmt.Sprint(v))
	if err != nil {
		return 0
	}
	return d
}

// selected are the workloads that labels select.
func selected(objects []*object, labels map[string]string) []*object {
	var out []*object
	for _, o := range objects {
		all := o.workload() && len(labels) > 0
		for k, v := range labels {
			all = all && o.Spec.Template.Metadata.Labels[k] == v
		}
		if all {
			out = append(out, o)
		}
	}
	return out
}

// What refers to something finds it: selectors, ports, settings.
func TestReferences(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects := render(t, name)
			for _, o := range objects {
				if o.Metadata.Namespace != "messages" {
					t.Errorf("%v is in namespace %q", o, o.Metadata.Namespace)
				}
				labels := o.Spec.Selector.MatchLabels
				switch o.Kind {
				case "Service":
					labels = o.Spec.Selector.Labels
				case "NetworkPolicy":
					labels = o.Spec.PodSelector.MatchLabels
				case "StatefulSet", "Deployment", "PodDisruptionBudget":
				case "PodMonitor":
					for _, e := range o.Spec.PodMetricsEndpoints {
						if !slices.ContainsFunc(selected(objects, labels), func(w *object) bool { return w.Spec.Template.Spec.Containers[0].port(e.Port) > 0 }) {
							t.Errorf("%v scrapes port %s, which no pod has", o, e.Port)
						}
					}
					continue
				default:
					continue
				}
				pods := selected(objects, labels)
				if len(pods) != 1 {
					t.Errorf("%v selects %v", o, pods)
					continue
				}
				c := pods[0].Spec.Template.Spec.Containers[0]
				for _, p := range o.Spec.Ports {
					if o.Kind == "Service" && c.port(p.TargetPort) != p.Port {
						t.Errorf("%v leads port %d to %s, which is %d", o, p.Port, p.TargetPort, c.port(p.TargetPort))
					}
				}
				for _, rule := range o.Spec.Ingress {
					for _, p := range rule.Ports {
						if c.port(p.Port) == 0 {
							t.Errorf("%v opens port %s, which no pod has", o, p.Port)
						}
					}
					if len(rule.From) == 0 {
						t.Errorf("%v opens a port to everybody", o)
					}
				}
				if !o.workload() {
					continue
				}
				if pods[0] != o {
					t.Errorf("%v selects %v", o, pods)
				}
				if b := find(t, objects, "PodDisruptionBudget", o.Metadata.Name); b.Spec.MaxUnavailable != 1 {
					t.Errorf("%v lets %d go", b, b.Spec.MaxUnavailable)
				}
				if o.Kind == "StatefulSet" && find(t, objects, "Service", o.Spec.ServiceName).Spec.ClusterIP != "None" {
					t.Errorf("the service of %v is not headless", o)
				}
				for _, v := range o.Spec.Template.Spec.Volumes {
					if v.ConfigMap.Name != "" {
						find(t, objects, "ConfigMap", v.ConfigMap.Name)
					}
				}
			}
		})
	}
}

// Pods get no rights, and nothing that they do not use.
func TestPodsHaveNoRights(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		for _, o := range render(t, name) {
			var spec podSpec
			switch {
			case o.workload():
				spec = o.Spec.Template.Spec
			case o.Kind == "Pod":
				spec = testPod(t, o)
			default:
				continue
			}
			if s := spec.SecurityContext; !s.RunAsNonRoot || s.RunAsUser == 0 || s.SeccompProfile.Type != "RuntimeDefault" {
				t.Errorf("%s: %v runs as %+v", name, o, s)
			}
			if spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken || spec.EnableServiceLinks == nil || *spec.EnableServiceLinks {
				t.Errorf("%s: %v has a token, or variables of services", name, o)
			}
			for _, c := range spec.Containers {
				if s := c.SecurityContext; s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) {
					t.Errorf("%s: %v runs with %+v", name, o, s)
				}
			}
		}
	}
}

// testPod is the pod of `helm test`.
func testPod(t *testing.T, o *object) podSpec {
	t.Helper()
	text, err := yaml.Marshal(o.raw["spec"])
	if err != nil {
		t.Fatal(err)
	}
	var spec podSpec
	if err := yaml.Unmarshal(text, &spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

// Data outlives everything: no volume goes with its pod, its StatefulSet or the release, and nothing runs that could delete one.
func TestNothingDeletesVolumes(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		for _, o := range render(t, name) {
			if r := o.Spec.Retention; o.Kind == "StatefulSet" && (r.WhenDeleted != "Retain" || r.WhenScaled != "Retain") {
				t.Errorf("%s: %v keeps volumes %+v", name, o, r)
			}
			if hook := o.Metadata.Annotations["helm.sh/hook"]; hook != "" && hook != "test" {
				t.Errorf("%s: %v runs at %s", name, o, hook)
			}
			switch o.Kind {
			case "ConfigMap", "Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "Service", "StatefulSet":
			default:
				t.Errorf("%s: %v: of that kind there is none that this test knows", name, o)
			}
		}
	}
}

// What the values add reaches every kind of pod.
func TestExtras(t *testing.T) {
	t.Parallel()
	n := 0
	for _, o := range render(t, "everything") {
		if !o.workload() {
			continue
		}
		n++
		text, err := yaml.Marshal(o.raw)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"example.net/owner: messaging", "team: messaging", "name: GODEBUG", "emptyDir: {}", "mountPath: /extra", "disk: nvme", "key: dedicated",
			"nodeAffinity:", "priorityClassName: messaging", "serviceAccountName: messaging", "image: registry.example.net/", "imagePullPolicy: Always", "name: registry",
		} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%v lacks %q", o, want)
			}
		}
	}
	if n != 3 {
		t.Errorf("%d workloads", n)
	}
}

// Bookies are never restarted behind an operator's back, and copies that must span zones are on bookies that do.
func TestPlacement(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		objects := render(t, name)
		bookies := find(t, objects, "StatefulSet", "penstock-bookie")
		if bookies.Spec.UpdateStrategy.Type != "OnDelete" {
			t.Errorf("%s: bookies are updated by %s", name, bookies.Spec.UpdateStrategy.Type)
		}
		for _, o := range objects {
			if !o.workload() {
				continue
			}
			spread, err := yaml.Marshal(o.raw["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)["topologySpreadConstraints"])
			if err != nil {
				t.Fatal(err)
			}
			hard := strings.Count(string(spread), "whenUnsatisfiable: DoNotSchedule")
			want := 1
			switch {
			case o.Kind == "Deployment":
				want = 0
			case name == "zones":
				want = 2
			}
			if hard != want {
				t.Errorf("%s: %v has %d hard constraints, want %d", name, o, hard, want)
			}
		}
	}
}

// What docs/operations.md tells one to type is about objects and values that there are.
func TestOperationsPage(t *testing.T) {
	t.Parallel()
	page := read(t, "../../docs/operations.md")
	_, page, _ = strings.Cut(page, "## On Kubernetes")
	page, _, _ = strings.Cut(page, "## Capacity")
	objects := render(t, "defaults")
	claims := map[string]bool{}
	for _, o := range objects {
		if o.Kind != "StatefulSet" {
			continue
		}
		for i := range o.Spec.Replicas {
			claims[fmt.Sprintf("data-%s-%d", o.Metadata.Name, i)] = true
			claims[fmt.Sprintf("%s-%d", o.Metadata.Name, i)] = true
		}
	}
	kinds := map[string]string{"deploy": "Deployment", "sts": "StatefulSet", "statefulset": "StatefulSet"}
	named := regexp.MustCompile(`\b(deploy|sts|statefulset|pod|pvc)(?:/| -n messages )(\S*penstock-[a-z0-9-]+)`).FindAllStringSubmatch(page, -1)
	if len(named) < 10 {
		t.Errorf("the page names %d objects", len(named))
	}
	for _, m := range named {
		if kind, ok := kinds[m[1]]; ok {
			find(t, objects, kind, m[2])
		} else if !claims[m[2]] {
			t.Errorf("the page names %s/%s, which there is not", m[1], m[2])
		}
	}
	// Values stand in it as they would in a file.
	values := regexp.MustCompile(`(?m)^((?:image|bookie|broker|etcd): \{.*?\})(?: *#.*)?$`).FindAllStringSubmatch(page, -1)
	if len(values) < 4 {
		t.Errorf("the page has %d values", len(values))
	}
	for _, m := range values {
		file := filepath.Join(t.TempDir(), "values.yaml")
		// Copies for one bookie are a setting of its own.
		text := m[1] + "\n"
		if strings.HasPrefix(text, "bookie: {replicas: 1}") {
			text += "broker: {settings: {ensemble: 1, write-quorum: 1, ack-quorum: 1}}\n"
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := template(t, "helm4", "--values", file); err != nil {
			t.Errorf("%s: %v", m[1], err)
		}
	}
}
