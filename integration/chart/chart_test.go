package chart

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "make the present state the last release's")

const (
	chartDir = "../../deploy/helm/penstock"
	release  = "penstock"
	// oldest is the oldest Kubernetes that the chart takes, zones apart; newest the one whose schemas are kept here.
	oldest, newest = "1.32.0", "1.37.0"
)

// cases are the names of the matrix's values files.
func cases(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/values/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("values files: %v, %v", files, err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".yaml")
	}
	return files
}

func valuesFile(name string) string { return filepath.Join("testdata", "values", name+".yaml") }

// tool is the path of a program that `make chart-tools` builds, or `make build`.
func tool(t *testing.T, path ...string) string {
	t.Helper()
	full, err := filepath.Abs(filepath.Join(append([]string{"..", "..", "bin"}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(full); err != nil {
		t.Fatalf("%v: run `make build chart-tools` first", err)
	}
	return full
}

// helm runs one of the two helms, with nothing of this machine's own settings.
func helm(t *testing.T, version string, args ...string) (string, error) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(t.Context(), tool(t, "chart", version), args...)
	home := t.TempDir()
	cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + filepath.Join(home, "none")}
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return out.String(), errors.New(errOut.String())
	}
	return out.String(), nil
}

var helms = []string{"helm3", "helm4"}

func template(t *testing.T, version string, args ...string) (string, error) {
	t.Helper()
	return helm(t, version, append([]string{"template", release, chartDir, "--namespace", "messages", "--kube-version", newest}, args...)...)
}

// render renders one of the matrix.
func render(t *testing.T, name string) []*object {
	t.Helper()
	text, err := template(t, "helm4", "--values", valuesFile(name))
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, text)
}

// object is what these tests look at of an object of Kubernetes.
type object struct {
	Kind     string
	Metadata struct {
		Name, Namespace     string
		Labels, Annotations map[string]string
	}
	Data map[string]string
	Spec struct {
		ClusterIP string `yaml:"clusterIP"`
		Replicas  int
		Selector  struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
			Labels      map[string]string `yaml:",inline"`
		}
		Ports []struct {
			Name       string
			TargetPort string `yaml:"targetPort"`
			Port       int
		}
		Template struct {
			Metadata struct{ Labels, Annotations map[string]string }
			Spec     podSpec
		}
		PodSelector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		} `yaml:"podSelector"`
		Ingress []struct {
			Ports []struct{ Port string }
			From  []map[string]any
		}
		MaxUnavailable int `yaml:"maxUnavailable"`
		Groups         []struct {
			Rules []struct{ Alert, Expr string }
		}
		PodMetricsEndpoints []struct{ Port, Path string } `yaml:"podMetricsEndpoints"`
		ServiceName         string                        `yaml:"serviceName"`
		UpdateStrategy      struct{ Type string }         `yaml:"updateStrategy"`
		Retention           struct {
			WhenDeleted string `yaml:"whenDeleted"`
			WhenScaled  string `yaml:"whenScaled"`
		} `yaml:"persistentVolumeClaimRetentionPolicy"`
	}
	raw map[string]any
}

type podSpec struct {
	RestartPolicy                 string `yaml:"restartPolicy"`
	AutomountServiceAccountToken  *bool  `yaml:"automountServiceAccountToken"`
	EnableServiceLinks            *bool  `yaml:"enableServiceLinks"`
	TerminationGracePeriodSeconds int    `yaml:"terminationGracePeriodSeconds"`
	SecurityContext               struct {
		RunAsNonRoot   bool                  `yaml:"runAsNonRoot"`
		RunAsUser      int                   `yaml:"runAsUser"`
		SeccompProfile struct{ Type string } `yaml:"seccompProfile"`
	} `yaml:"securityContext"`
	Containers []container
	Volumes    []struct {
		Name      string
		ConfigMap struct{ Name string } `yaml:"configMap"`
	}
}

type container struct {
	Name, Image   string
	Command, Args []string
	Env           []struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
			ConfigMapKeyRef struct{ Name, Key string } `yaml:"configMapKeyRef"`
		} `yaml:"valueFrom"`
	}
	Ports []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
	}
	StartupProbe   *probe `yaml:"startupProbe"`
	LivenessProbe  *probe `yaml:"livenessProbe"`
	ReadinessProbe *probe `yaml:"readinessProbe"`
	VolumeMounts   []struct {
		Name      string
		MountPath string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		Capabilities             struct{ Drop []string }
	} `yaml:"securityContext"`
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

// port is the number of a named port; 0 if the container has none of that name.
func (c *container) port(name string) int {
	for _, p := range c.Ports {
		if p.Name == name {
			return p.ContainerPort
		}
	}
	return 0
}

// workload tells whether an object makes pods that stay.
func (o *object) workload() bool { return o.Kind == "StatefulSet" || o.Kind == "Deployment" }

func (o *object) String() string { return o.Kind + "/" + o.Metadata.Name }

func parse(t *testing.T, text string) []*object {
	t.Helper()
	var objects []*object
	for dec := yaml.NewDecoder(strings.NewReader(text)); ; {
		var node yaml.Node
		err := dec.Decode(&node)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("parse: %v\n%s", err, text)
		}
		o := &object{}
		if err := node.Decode(&o.raw); err != nil {
			t.Fatal(err)
		}
		if o.raw == nil {
			continue // a comment
		}
		if err := node.Decode(o); err != nil {
			t.Fatalf("%v: %v", o.raw["kind"], err)
		}
		objects = append(objects, o)
	}
}

// find returns the object of a kind and a name.
func find(t *testing.T, objects []*object, kind, name string) *object {
	t.Helper()
	for _, o := range objects {
		if o.Kind == kind && o.Metadata.Name == name {
			return o
		}
	}
	t.Fatalf("there is no %s/%s", kind, name)
	return nil
}

// Both helms that are in use find nothing to say, and render the same.
func TestHelm3And4(t *testing.T) {
	t.Parallel()
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var rendered [][]*object
			for _, version := range helms {
				if _, err := helm(t, version, "lint", "--strict", "--kube-version", newest, "--values", valuesFile(name), chartDir); err != nil {
					t.Errorf("%s lint: %v", version, err)
				}
				text, err := template(t, version, "--values", valuesFile(name))
				if err != nil {
					t.Fatalf("%s template: %v", version, err)
				}
				rendered = append(rendered, parse(t, text))
			}
			if !reflect.DeepEqual(rendered[0], rendered[1]) {
				t.Error("helm 3 and helm 4 render different objects")
			}
		})
	}
}

// What the API would refuse is refused here: unknown fields, wrong types, missing fields.
func TestSchemas(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, text string) error {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), tool(t, "chart", "kubeconform"), "-strict", "-schema-location", "testdata/schemas/{{.ResourceKind}}.json", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return errors.New(string(out))
		}
		return nil
	}
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, err := template(t, "helm4", "--values", valuesFile(name))
			if err != nil {
				t.Fatal(err)
			}
			if err := check(t, text); err != nil {
				t.Error(err)
			}
			for right, wrong := range map[string]string{
				"failureThreshold: 6": "failureTreshold: 6", "podManagementPolicy: Parallel": "podManagementPolicy: [Parallel]",
				"clusterIP: None": "clusterIp: None", "maxUnavailable: 1": "maxUnavailable: {}", "serviceName: ": "service: ",
			} {
				if broken := strings.Replace(text, right, wrong, 1); broken == text || check(t, broken) == nil {
					t.Errorf("%q in place of %q goes unnoticed", wrong, right)
				}
			}
		})
	}
}

// Values that make no cluster are refused before anything is changed, with what to do.
func TestRefusedValues(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"a setting that is none":         {[]string{"--set", "bookie.settings.segment-mbi=3"}, "segment-mbi"},
		"a setting that the chart makes": {[]string{"--set", "bookie.settings.data-dir=/x"}, "data-dir"},
		"a setting of the wrong kind":    {[]string{"--set", "broker.settings.roll-age=often"}, "roll-age"},
		"a value that is none":           {[]string{"--set", "bookies.replicas=3"}, "bookies"},
		"an even number of members":      {[]string{"--set", "etcd.replicas=2"}, "etcd/replicas"},
		"an endpoint without a port":     {[]string{"--set", "etcd.endpoints={etcd}"}, "etcd/endpoints"},
		"too few bookies":                {[]string{"--set", "bookie.replicas=2"}, "raise it, or lower broker.settings.ensemble"},
		"zones where pods have none":     {[]string{"--set", "broker.settings.min-zones=2", "--kube-version", "1.34.0"}, "needs Kubernetes 1.35"},
		"a Kubernetes that is too old":   {[]string{"--kube-version", "1.31.0"}, "incompatible"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, version := range helms {
				if _, err := template(t, version, c.args...); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: %v, want an error with %q", version, err, c.want)
				}
			}
		})
	}
	if _, err := template(t, "helm4", "--kube-version", oldest); err != nil {
		t.Errorf("Kubernetes %s: %v", oldest, err)
	}
}
