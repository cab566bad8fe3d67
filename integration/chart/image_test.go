package chart

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What the image is built from is there, and builds without what .dockerignore leaves out; what it starts runs where nothing else is.
func TestImage(t *testing.T) {
	t.Parallel()
	file := read(t, "../../Dockerfile")
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "../../go.mod"))[1]
	if !strings.Contains(file, "FROM golang:"+version+" AS build\n") {
		t.Errorf("the image is not built with Go %s", version)
	}
	last := file[strings.LastIndex(file, "FROM "):]
	if !strings.HasPrefix(last, "FROM scratch\n") || !regexp.MustCompile(`(?m)^USER 10001:10001$`).MatchString(last) {
		t.Errorf("the image is not the programs alone, or runs them as root:\n%s", last)
	}
	for _, program := range []string{"etcd", "etcdctl", "etcdutl"} {
		if !strings.Contains(last, "/src/bin/"+program+" ") {
			t.Errorf("the image lacks %s", program)
		}
	}
	for _, program := range []string{"broker", "bookie", "penstock"} {
		if !strings.Contains(last, "/src/bin/"+program+" ") {
			t.Errorf("the image lacks %s", program)
		}
		bin, err := elf.Open(tool(t, program))
		if err != nil {
			t.Logf("%s is not for Linux: %v", program, err)
			continue
		}
		for _, p := range bin.Progs {
			if p.Type == elf.PT_INTERP {
				t.Errorf("%s needs a loader, which the image does not have", program)
			}
		}
		bin.Close()
	}
	for _, target := range regexp.MustCompile(`(?m)^RUN make (\S+)`).FindAllStringSubmatch(file, -1) {
		if !strings.Contains(read(t, "../../Makefile"), "\n"+target[1]+":") {
			t.Errorf("the image is built by make %s, which there is not", target[1])
		}
	}

	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	ignored := strings.Fields(read(t, "../../.dockerignore"))
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.Dir}}{{end}}", "./cmd/...")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range strings.Fields(string(out)) {
		inside, ours := strings.CutPrefix(dir, root+string(filepath.Separator))
		if top, _, _ := strings.Cut(inside, string(filepath.Separator)); ours && slices.Contains(ignored, top) {
			t.Errorf("%s is needed to build, and .dockerignore leaves it out", inside)
		}
	}
}

// service is what this test looks at of a service in a compose file.
type service struct {
	Image       string
	Command     []string
	Entrypoint  []string
	DependsOn   []string `yaml:"depends_on"`
	Volumes     []string
	Environment map[string]string
	Profiles    []string
	ReadOnly    bool `yaml:"read_only"`
}

// The compose file starts programs that take its flags, under names that others know them by, with volumes that are declared.
func TestComposeFile(t *testing.T) {
	t.Parallel()
	var file struct {
		Services map[string]service
		Volumes  map[string]any
	}
	dec := yaml.NewDecoder(strings.NewReader(read(t, "../../docker-compose.yml")))
	if err := dec.Decode(&file); err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	used := map[string]string{}
	ids := map[any]string{}
	for name, s := range file.Services {
		for _, d := range s.DependsOn {
			if _, there := file.Services[d]; !there {
				t.Errorf("%s depends on %s, which there is not", name, d)
			}
		}
		for _, v := range s.Volumes {
			volume, _, _ := strings.Cut(v, ":")
			if _, there := file.Volumes[volume]; !there || used[volume] != "" {
				t.Errorf("volume %s of %s is not declared, or also %q's", volume, name, used[volume])
			}
			used[volume] = name
		}
		for _, host := range regexp.MustCompile(`([a-z][a-z0-9-]*):(?:2379|765\d)`).FindAllStringSubmatch(fmt.Sprint(s.Command, s.Environment), -1) {
			if _, there := file.Services[host[1]]; !there {
				t.Errorf("%s looks for %s, which there is not", name, host[1])
			}
		}
		if len(s.Command) == 0 {
			continue
		}
		program := filepath.Base(s.Command[0])
		count[program]++
		if program == "etcd" {
			help, err := exec.CommandContext(t.Context(), tool(t, "etcd"), "--help").CombinedOutput()
			if err != nil {
				t.Fatal(err)
			}
			for _, arg := range s.Command[1:] {
				if flag, _, _ := strings.Cut(arg, "="); !regexp.MustCompile(`(?m)^\s*` + flag + `\b`).Match(help) {
					t.Errorf("etcd has no %s", flag)
				}
			}
			continue
		}
		if !s.ReadOnly {
			t.Errorf("%s may write outside of its volume", name)
		}
		is := printConfig(t, program, s.Command[1:]...)
		id := is[program+"-id"]
		if is["advertise"] != name || ids[id] != "" {
			t.Errorf("%s is advertised as %v, with the id %v that %q has too", name, is["advertise"], id, ids[id])
		}
		ids[id] = name
		dir, ok := is["data-dir"].(string)
		if ok && (len(s.Volumes) != 1 || !strings.HasPrefix(dir, strings.Split(s.Volumes[0], ":")[1]+"/")) {
			t.Errorf("the data of %s, %s, is not on its volume %v", name, dir, s.Volumes)
		}
	}
	if count["bookie"] != 3 || count["broker"] != 2 || count["etcd"] != 1 {
		t.Errorf("the file starts %v", count)
	}
	if cli := file.Services["penstock"]; !slices.Equal(cli.Entrypoint, []string{"/usr/bin/penstock"}) || !slices.Equal(cli.Profiles, []string{"cli"}) || cli.Environment["PENSTOCK_URL"] == "" {
		t.Errorf("the command line is %+v", cli)
	}
}
