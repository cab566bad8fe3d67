//go:build linux && !noroot

package chart

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/penstock-mq/penstock/integration/hosts"
)

// testTimeout is far above what the test takes on a busy machine, so that a hang has an end.
const testTimeout = 5 * time.Minute

// node is the machine that the pods of a test run on. Each pod has an address of its own, a file system that holds the image's programs,
// its settings and its volumes, and the user that the chart gives it: nothing else can be read or written. Its command line is
// the chart's. etcd runs as this machine's, with directories and names replaced.
type node struct {
	*testing.T
	ctx     context.Context //nolint:containedctx // the test's, with an end
	objects []*object
	network *hosts.Network
	launch  *launcher
	names   map[string]string // what DNS would answer
	pods    []*running
}

type running struct {
	pod

	container *container
	component string
	root      string // of its file system
	user      int
	enter     []string // leads to its host
	log       string
	cmd       *exec.Cmd
	ended     chan error
}

func newNode(t *testing.T, objects []*object) *node {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	t.Cleanup(cancel)
	n := &node{T: t, ctx: ctx, objects: objects, network: hosts.New(t), launch: newLauncher(), names: map[string]string{}}
	t.Cleanup(n.launch.close)
	for _, o := range objects {
		if !o.workload() {
			continue
		}
		c := &o.Spec.Template.Spec.Containers[0]
		for i := range o.Spec.Replicas {
			p := n.add(fmt.Sprintf("%s-%d", o.Metadata.Name, i), c, o.Spec.Template.Spec.SecurityContext.RunAsUser)
			if o.Spec.ServiceName != "" {
				n.names[fmt.Sprintf("%s.%s.%s.svc", p.name, o.Spec.ServiceName, o.Metadata.Namespace)] = p.ip
			}
			for _, s := range objects { // a service leads to its first pod
				host := fmt.Sprintf("%s.%s.svc", s.Metadata.Name, s.Metadata.Namespace)
				if s.Kind == "Service" && slices.Contains(selected(objects, s.Spec.Selector.Labels), o) && n.names[host] == "" {
					n.names[host] = p.ip
				}
			}
		}
	}
	return n
}

// add makes a pod that does not run yet.
func (n *node) add(name string, c *container, user int) *running {
	n.Helper()
	i := len(n.pods)
	p := &running{container: c, component: c.Name, root: n.TempDir(), user: user}
	ip, enter := n.network.Place(name)
	p.enter = enter
	p.pod = pod{name: name, ip: ip, node: fmt.Sprintf("node-%d", i), zone: string(rune('a' + i%3))}
	p.log = filepath.Join(n.TempDir(), "log")
	n.pods = append(n.pods, p)
	return p
}

// of returns the pods of a component.
func (n *node) of(component string) []*running {
	var out []*running
	for _, p := range n.pods {
		if p.component == component {
			out = append(out, p)
		}
	}
	return out
}

// build lays a pod's file system: the program, DNS, the settings, the volumes.
func (n *node) build(p *running) {
	n.Helper()
	n.check(os.Chmod(p.root, 0o755))
	bin := filepath.Join(p.root, "usr", "bin")
	for _, dir := range []string{bin, filepath.Join(p.root, "etc", "penstock")} {
		n.check(os.MkdirAll(dir, 0o755))
	}
	program := filepath.Base(p.container.Command[0])
	n.check(place(tool(n.T, program), filepath.Join(bin, program)))
	var hosts strings.Builder
	for name, ip := range n.names {
		fmt.Fprintln(&hosts, ip, name)
	}
	n.check(os.WriteFile(filepath.Join(p.root, "etc", "hosts"), []byte(hosts.String()), 0o644))
	for _, m := range p.container.VolumeMounts {
		dir := filepath.Join(p.root, m.MountPath)
		n.check(os.MkdirAll(dir, 0o755))
		if m.Name != "settings" {
			n.check(os.Chown(dir, p.user, p.user))
			n.check(os.Mkdir(filepath.Join(dir, "lost+found"), 0o700)) // as a new ext4 has it
			continue
		}
		for name, text := range find(n.T, n.objects, "ConfigMap", "penstock-"+p.component).Data {
			n.check(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		}
	}
}

// place puts a program somewhere else, without a copy where that is possible.
func place(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// command is a program in a pod.
func (n *node) command(p *running, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(n.ctx, "/usr/bin/"+name, args...)
	cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.root, Credential: &syscall.Credential{Uid: uint32(p.user), Gid: uint32(p.user)}}
	return cmd
}

// output runs a command in a pod to its end.
func (n *node) output(p *running, cmd *exec.Cmd) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.launch.start(cmd, p.enter); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// etcd is a member's command.
func (n *node) etcd(p *running) *exec.Cmd {
	n.Helper()
	var here, env []string
	for _, m := range p.container.VolumeMounts {
		here = append(here, "="+m.MountPath, "="+filepath.Join(p.root, m.MountPath))
	}
	for name, ip := range n.names {
		here = append(here, name, ip)
	}
	for _, e := range p.container.Env {
		if from := e.ValueFrom.ConfigMapKeyRef; from.Name != "" {
			env = append(env, e.Name+"="+find(n.T, n.objects, "ConfigMap", from.Name).Data[from.Key])
		}
	}
	args := p.args(p.container)
	for i := range args {
		args[i] = strings.NewReplacer(here...).Replace(args[i])
	}
	cmd := exec.CommandContext(n.ctx, tool(n.T, "etcd"), args...)
	cmd.Env, cmd.SysProcAttr = env, &syscall.SysProcAttr{}
	return cmd
}

// start starts a pod.
func (n *node) start(p *running) {
	n.Helper()
	n.build(p)
	log, err := os.Create(p.log)
	n.check(err)
	defer log.Close()
	if program := filepath.Base(p.container.Command[0]); program == "etcd" {
		p.cmd = n.etcd(p)
	} else {
		p.cmd = n.command(p, program, p.args(p.container)...)
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	n.check(n.launch.start(p.cmd, p.enter))
	cmd, ended := p.cmd, make(chan error, 1)
	p.ended = ended
	go func() { ended <- cmd.Wait() }()
	n.Cleanup(func() {
		_ = cmd.Process.Kill()
		if err := <-ended; n.Failed() {
			text, _ := os.ReadFile(p.log)
			n.Logf("%s ended with %v; its log:\n%s", p.name, err, text[max(0, len(text)-4000):])
		}
	})
}

// stop tells a pod to end, as Kubernetes does, and demands that it ends well.
func (n *node) stop(p *running) {
	n.Helper()
	n.check(p.cmd.Process.Signal(syscall.SIGTERM))
	err := <-p.ended
	p.ended <- err
	if err != nil {
		n.Errorf("%s ended with %v", p.name, err)
	}
}

// url is a probe's.
func (p *running) url(h *probe) string {
	return "http://" + net.JoinHostPort(p.ip, strconv.Itoa(p.container.port(h.HTTPGet.Port))) + h.HTTPGet.Path
}

func (n *node) get(url string) (string, error) {
	ctx, cancel := context.WithTimeout(n.ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, body)
	}
	return string(body), err
}

// answers waits until a probe succeeds.
func (n *node) answers(p *running, h *probe) {
	n.Helper()
	for {
		_, err := n.get(p.url(h))
		if err == nil {
			return
		}
		select {
		case ended := <-p.ended:
			p.ended <- ended
			n.Fatalf("%s ended: %v", p.name, ended)
		case <-n.ctx.Done():
			n.Fatalf("%s: %v", p.name, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (n *node) check(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// penstock runs the command line in a pod, as `kubectl exec` does.
func (n *node) penstock(p *running, args ...string) string {
	n.Helper()
	to := filepath.Join(p.root, "usr", "bin", "penstock")
	if _, err := os.Stat(to); err != nil {
		n.check(place(tool(n.T, "penstock"), to))
	}
	out, err := n.output(p, n.command(p, "penstock", args...))
	if err != nil {
		n.Fatalf("penstock %v: %v: %s", args, err, out)
	}
	return out
}

// The chart's command lines, settings, ports, probes and volumes make a cluster: every pod gets ready, bookies know their hosts and zones,
// `helm test` and the commands of the notes succeed, alerts are about metrics that there are, and SIGTERM ends all in good order.
func TestRenderedClusterRuns(t *testing.T) {
	t.Parallel()
	// Small segments, and disks that may be as full as this machine's is.
	text, err := template(t, "helm4", "--values", valuesFile("zones"), "--set", "bookie.settings.segment-mib=16,bookie.settings.low-watermark=0.98,bookie.settings.high-watermark=0.99")
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t, parse(t, text))
	for _, p := range n.pods {
		n.start(p)
	}
	for _, p := range n.pods {
		for _, h := range []*probe{p.container.StartupProbe, p.container.LivenessProbe, p.container.ReadinessProbe} {
			if h != nil {
				n.answers(p, h)
			}
		}
	}
	broker := n.of("broker")[0]

	bookies := n.penstock(broker, "bookie", "list", "-o", "wide")
	for _, p := range n.of("bookie") {
		if !regexp.MustCompile(`(?m)^` + p.name + `\b.*\b` + p.zone + `\b.*\b` + p.node + `\b`).MatchString(bookies) {
			t.Errorf("%s does not stand on %s in %s:\n%s", p.name, p.node, p.zone, bookies)
		}
	}

	testing := find(t, n.objects, "Pod", release+"-test")
	spec := testPod(t, testing)
	tester := n.add(testing.Metadata.Name, &spec.Containers[0], spec.SecurityContext.RunAsUser)
	n.build(tester)
	verify := n.command(tester, "penstock", append(slices.Clone(spec.Containers[0].Args), "--duration=1s", "--rate=200")...)
	if out, err := n.output(tester, verify); err != nil {
		t.Errorf("helm test: %v: %s", err, out)
	}

	n.notes(broker)
	n.metrics()
	for _, component := range []string{"broker", "bookie"} {
		for _, p := range n.of(component) {
			n.stop(p)
		}
	}
	for _, p := range n.of("broker") {
		if log, err := os.ReadFile(p.log); err != nil || bytes.Contains(log, []byte("level=ERROR")) {
			t.Errorf("%s stopped: %v\n%s", p.name, err, log)
		}
	}
}

// A member of etcd that comes back without its disk is not let in, since it would not know what it has promised. It is once it was
// removed and added, and etcd.rejoin is set, which replaces no other member.
func TestEtcdMemberRejoins(t *testing.T) {
	t.Parallel()
	members := func(args ...string) []*object {
		text, err := template(t, "helm4", append(args, "--show-only", "templates/etcd.yaml")...)
		if err != nil {
			t.Fatal(err)
		}
		return parse(t, text)
	}
	n := newNode(t, members())
	for _, p := range n.pods {
		n.start(p)
	}
	for _, p := range n.pods {
		n.answers(p, p.container.ReadinessProbe)
	}
	lost := n.pods[1]
	n.check(lost.cmd.Process.Kill())
	lost.ended <- <-lost.ended
	n.check(os.RemoveAll(lost.root))
	n.check(os.Mkdir(lost.root, 0o755))
	n.start(lost)
	err := <-lost.ended
	lost.ended <- err
	if log := read(t, lost.log); err == nil || !strings.Contains(log, "has already been bootstrapped") {
		t.Fatalf("a member without data ended with %v:\n%s", err, log)
	}

	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{n.pods[0].ip + ":2379"}, Logger: zap.NewNop()})
	n.check(err)
	defer etcd.Close()
	all, err := etcd.MemberList(n.ctx)
	n.check(err)
	i := slices.IndexFunc(all.Members, func(m *etcdserverpb.Member) bool { return m.Name == lost.name })
	if i < 0 || len(all.Members) != len(n.pods) {
		t.Fatalf("%v", all.Members)
	}
	for _, change := range []func() error{
		func() error { _, err := etcd.MemberRemove(n.ctx, all.Members[i].ID); return err },
		func() error { _, err := etcd.MemberAdd(n.ctx, all.Members[i].PeerURLs); return err },
	} {
		err := change()
		for err != nil && strings.Contains(err.Error(), "unhealthy cluster") && n.ctx.Err() == nil {
			select { // the others must have been together for some seconds
			case <-n.ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			err = change()
		}
		n.check(err)
	}
	before := n.objects
	n.objects = members("--set", "etcd.rejoin=true")
	name := release + "-etcd"
	if was, is := find(t, before, "StatefulSet", name), find(t, n.objects, "StatefulSet", name); !reflect.DeepEqual(was, is) {
		t.Error("etcd.rejoin replaces members")
	}
	n.check(os.RemoveAll(lost.root))
	n.check(os.Mkdir(lost.root, 0o755))
	n.start(lost)
	n.answers(lost, lost.container.ReadinessProbe)
}

// notes runs the commands that the chart's notes tell one to type in a broker.
func (n *node) notes(broker *running) {
	n.Helper()
	notes, err := helm(n.T, "helm4", "install", release, chartDir, "--namespace", "messages", "--dry-run=client", "--values", valuesFile("zones"))
	n.check(err)
	_, notes, _ = strings.Cut(notes, "NOTES:")
	commands := regexp.MustCompile(`(?m)^  kubectl exec -n messages deploy/penstock-broker -- penstock (.*)$`).FindAllStringSubmatch(notes, -1)
	if len(commands) != 3 {
		n.Fatalf("the notes have %d commands:\n%s", len(commands), notes)
	}
	for _, c := range commands {
		out := n.penstock(broker, strings.Fields(c[1])...)
		if strings.HasPrefix(c[1], "consume") && out != "hello\n" {
			n.Errorf("consumed %q", out)
		}
	}
}

// metrics demands that what the alerts ask for is there, of the ports that the PodMonitor scrapes, within the seconds that
// brokers take to look at their topics.
func (n *node) metrics() {
	n.Helper()
	objects := render(n.T, "everything")
	rules := find(n.T, objects, "PrometheusRule", release).Spec.Groups[0].Rules
	if len(rules) < 10 {
		n.Errorf("%d alerts", len(rules))
	}
	for {
		missing := n.missing(rules, n.scrape(find(n.T, objects, "PodMonitor", release)))
		if len(missing) == 0 {
			return
		}
		select {
		case <-n.ctx.Done():
			n.Errorf("there is not: %s", strings.Join(missing, ", "))
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// scrape returns what the ports answer that a PodMonitor names.
func (n *node) scrape(monitor *object) string {
	n.Helper()
	var there strings.Builder
	for _, p := range n.pods {
		for _, e := range append(monitor.Spec.PodMetricsEndpoints, struct{ Port, Path string }{"metrics", "/metrics"}) {
			port := p.container.port(e.Port)
			if port == 0 || e.Path == "/metrics/topics" && p.component != "broker" {
				continue
			}
			text, err := n.get("http://" + net.JoinHostPort(p.ip, strconv.Itoa(port)) + e.Path)
			n.check(err)
			there.WriteString(text)
		}
	}
	return there.String()
}

// missing are the metrics that rules ask for and a text does not have.
func (n *node) missing(rules []struct{ Alert, Expr string }, there string) (out []string) {
	n.Helper()
	for _, r := range rules {
		names := regexp.MustCompile(`\b((?:penstock|etcd)_\w+)\{job="messages/penstock"[,}]`).FindAllStringSubmatch(r.Expr, -1)
		if len(names) == 0 {
			n.Fatalf("%s asks for nothing of this release: %s", r.Alert, r.Expr)
		}
		for _, name := range names {
			if !strings.Contains(there, "\n"+name[1]+"{") && !strings.Contains(there, "\n"+name[1]+" ") {
				out = append(out, r.Alert+": "+name[1])
			}
		}
	}
	return out
}
