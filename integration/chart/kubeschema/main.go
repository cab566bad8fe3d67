// Command kubeschema writes JSON schemas of the kinds that the chart uses, for kubeconform: one file a kind, named like it. It takes them
// from the modules that publish the API: Kubernetes' OpenAPI files, and the Prometheus operator's definitions.
//
// A schema that kubeconform finds on the network would be another one tomorrow, and a clean machine may not reach it; all of them
// together would be tens of megabytes. So these are few, stripped of prose, and strict: a field that the API does not have is an error.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	kubernetes = "k8s.io/kubernetes@v1.37.2"
	operator   = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
)

// kinds are those of Kubernetes, by the file that has them.
var kinds = map[string][]string{
	"api__v1":                     {"ConfigMap", "Pod", "Service"},
	"apis__apps__v1":              {"Deployment", "StatefulSet"},
	"apis__networking.k8s.io__v1": {"NetworkPolicy"},
	"apis__policy__v1":            {"PodDisruptionBudget"},
}

// definitions are the operator's.
var definitions = map[string]string{"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}

const (
	refPrefix = "#/components/schemas/"
	defPrefix = "#/definitions/"
)

func main() {
	out := flag.String("out", "", "directory that the schemas are written to")
	flag.Parse()
	if err := run(*out); err != nil {
		fmt.Fprintln(os.Stderr, "kubeschema:", err)
		os.Exit(1)
	}
}

func run(out string) error {
	if err := os.MkdirAll(out, 0o755); err != nil { //nolint:gosec // it is part of the source
		return fmt.Errorf("make %s: %w", out, err)
	}
	dir, err := download(kubernetes)
	if err != nil {
		return err
	}
	for file, wanted := range kinds {
		schemas, err := openAPI(filepath.Join(dir, "api", "openapi-spec", "v3", file+"_openapi.json"))
		if err != nil {
			return err
		}
		for _, kind := range wanted {
			schema, err := closure(schemas, kind)
			if err != nil {
				return err
			}
			if err := write(out, kind, schema); err != nil {
				return err
			}
		}
	}
	if dir, err = download(operator); err != nil {
		return err
	}
	for kind, plural := range definitions {
		schema, err := definition(filepath.Join(dir, "example", "prometheus-operator-crd", "monitoring.coreos.com_"+plural+".yaml"))
		if err != nil {
			return err
		}
		if err := write(out, kind, schema); err != nil {
			return err
		}
	}
	return nil
}

// download returns the directory of a module.
func download(module string) (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", module) //nolint:gosec,noctx // one of the constants above, by hand
	cmd.Dir = os.TempDir()                                        // no module of ours is to know of it
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download %s: %w: %s", module, err, out)
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out, &found); err != nil {
		return "", fmt.Errorf("download %s: %w", module, err)
	}
	return found.Dir, nil
}

// openAPI reads the schemas of a file by name.
func openAPI(path string) (map[string]any, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read schemas: %w", err)
	}
	var file struct {
		Components struct{ Schemas map[string]any }
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("read schemas %s: %w", path, err)
	}
	return file.Components.Schemas, nil
}

// closure is the schema of a kind, with all that it refers to.
func closure(schemas map[string]any, kind string) (map[string]any, error) {
	found := ""
	for name, schema := range schemas {
		_, isKind := schema.(map[string]any)["x-kubernetes-group-version-kind"]
		if isKind && strings.HasSuffix(name, "."+kind) {
			found = name
		}
	}
	if found == "" {
		return nil, fmt.Errorf("find kind %s: it is not in its file", kind)
	}
	defs := map[string]any{}
	for open := []string{found}; len(open) > 0; {
		name := open[0]
		open = open[1:]
		if defs[name] != nil {
			continue
		}
		defs[name] = strict(schemas[name], func(ref string) { open = append(open, ref) })
	}
	return map[string]any{"$ref": defPrefix + found, "definitions": defs}, nil
}

// definition is the schema of the newest served version of a custom kind.
func definition(path string) (map[string]any, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read definition: %w", err)
	}
	var file struct {
		Spec struct {
			Versions []struct {
				Served bool
				Schema struct {
					OpenAPIV3Schema map[string]any `yaml:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("read definition %s: %w", path, err)
	}
	for _, v := range slices.Backward(file.Spec.Versions) {
		if v.Served {
			return strict(v.Schema.OpenAPIV3Schema, nil).(map[string]any), nil
		}
	}
	return nil, fmt.Errorf("read definition %s: no version is served", path)
}

// strict returns a schema without prose and defaults, that allows no fields but those it names. It tells refer of each schema named.
func strict(schema any, refer func(string)) any {
	switch s := schema.(type) {
	case []any:
		out := make([]any, len(s))
		for i := range s {
			out[i] = strict(s[i], refer)
		}
		return out
	case map[string]any:
		return strictObject(s, refer)
	}
	return schema
}

func strictObject(s map[string]any, refer func(string)) map[string]any {
	out := map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(s)) {
		switch value := s[key]; key {
		case "properties":
			fields := map[string]any{}
			for name, field := range value.(map[string]any) {
				fields[name] = strict(field, refer)
			}
			out[key] = fields
		case "$ref":
			name := strings.TrimPrefix(value.(string), refPrefix)
			refer(name)
			out[key] = defPrefix + name
		case "format": // of numbers and texts: how they are kept
		case "description", "default":
		default:
			if !strings.HasPrefix(key, "x-") {
				out[key] = strict(value, refer)
			}
		}
	}
	if s["x-kubernetes-int-or-string"] == true {
		delete(out, "type")
		out["anyOf"] = []any{map[string]any{"type": "integer"}, map[string]any{"type": "string"}}
	}
	_, open := out["additionalProperties"]
	if _, fields := out["properties"]; fields && !open && s["x-kubernetes-preserve-unknown-fields"] != true {
		out["additionalProperties"] = false
	}
	return out
}

func write(dir, kind string, schema map[string]any) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetIndent("", " ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(schema); err != nil {
		return fmt.Errorf("write schema of %s: %w", kind, err)
	}
	path := filepath.Join(dir, strings.ToLower(kind)+".json")
	if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil { //nolint:gosec // it is part of the source
		return fmt.Errorf("write schema of %s: %w", kind, err)
	}
	return nil
}
