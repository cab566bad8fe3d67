package chart

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// installed answers helm as an API server does that has the StatefulSets of a release, and returns the file that leads there.
func installed(t *testing.T, objects []*object) string {
	t.Helper()
	answers := map[string]any{
		"/version": map[string]string{"major": "1", "minor": "37", "gitVersion": "v" + newest},
		"/api":     map[string]any{"kind": "APIVersions", "versions": []string{"v1"}},
	}
	var groups []any
	for path, kinds := range map[string]map[string]string{
		"/api/v1":                    {"configmaps": "ConfigMap", "pods": "Pod", "services": "Service"},
		"/apis/apps/v1":              {"deployments": "Deployment", "statefulsets": "StatefulSet"},
		"/apis/networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
		"/apis/policy/v1":            {"poddisruptionbudgets": "PodDisruptionBudget"},
	} {
		version := strings.TrimPrefix(strings.TrimPrefix(path, "/apis/"), "/api/")
		var resources []any
		for name, kind := range kinds {
			resources = append(resources, map[string]any{"name": name, "singularName": strings.ToLower(kind), "namespaced": true, "kind": kind, "verbs": []string{"get"}})
		}
		answers[path] = map[string]any{"kind": "APIResourceList", "groupVersion": version, "resources": resources}
		if name, v, ok := strings.Cut(version, "/"); ok {
			named := map[string]string{"groupVersion": version, "version": v}
			groups = append(groups, map[string]any{"name": name, "versions": []any{named}, "preferredVersion": named})
		}
	}
	answers["/apis"] = map[string]any{"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
	for _, o := range objects {
		if o.Kind == "StatefulSet" {
			answers["/apis/apps/v1/namespaces/messages/statefulsets/"+o.Metadata.Name] = o.raw
		}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": http.StatusNotFound}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: x, clusters: [{name: x, cluster: {server: %q}}], contexts: [{name: x, context: {cluster: x}}]}`, server.URL)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// What would leave data behind, or make no cluster of the one that is there, is refused before anything is changed.
func TestRefusedUpgrades(t *testing.T) {
	t.Parallel()
	kubeconfig := installed(t, render(t, "defaults"))
	for name, c := range map[string]struct{ set, want string }{
		"nothing changes":    {"broker.replicas=5", ""},
		"more bookies":       {"bookie.replicas=4", ""},
		"fewer bookies":      {"bookie.replicas=2,broker.settings.ensemble=2", "bookie.replicas is 2, and there are 3"},
		"other disks":        {"bookie.storage.size=200Gi", "tells how disks grow"},
		"another class":      {"etcd.storage.className=fast", "tells how disks grow"},
		"another size of it": {"etcd.replicas=5", "etcd.replicas is 5, and there are 3"},
		"another etcd":       {"etcd.endpoints={etcd:2379}", "runs an etcd of its own"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, version := range helms {
				_, err := template(t, version, "--dry-run=server", "--is-upgrade", "--disable-openapi-validation", "--kubeconfig", kubeconfig, "--set", c.set)
				if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: %v, want %q", version, err, c.want)
				}
			}
		})
	}
}
