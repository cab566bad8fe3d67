package scale

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-mq/penstock/pkg/workload/process"
)

// usage is what processes take: of one, or of several together.
type usage struct {
	rss        float64       // bytes that the system counts as theirs
	live       float64       // bytes of objects after a garbage collection, and of stacks
	stacks     float64       // bytes of these
	goroutines float64       // that have those
	cpu        time.Duration // since they were started
}

func (u usage) plus(o usage) usage {
	return usage{u.rss + o.rss, u.live + o.live, u.stacks + o.stacks, u.goroutines + o.goroutines, u.cpu + o.cpu}
}

func (u usage) minus(o usage) usage {
	return usage{u.rss - o.rss, u.live - o.live, u.stacks - o.stacks, u.goroutines - o.goroutines, u.cpu - o.cpu}
}

// per divides all but the CPU.
func (u usage) per(n int) usage {
	by := float64(max(n, 1))
	return usage{u.rss / by, u.live / by, u.stacks / by, u.goroutines / by, u.cpu}
}

// cost is that of a cluster, by kind of process.
type cost struct {
	broker, bookie, etcd usage
	at                   time.Time
}

func (c cost) minus(o cost) cost {
	return cost{c.broker.minus(o.broker), c.bookie.minus(o.bookie), c.etcd.minus(o.etcd), c.at}
}

func (c cost) per(n int) cost {
	return cost{c.broker.per(n), c.bookie.per(n), c.etcd.per(n), c.at}
}

func (c cost) all() usage { return c.broker.plus(c.bookie).plus(c.etcd) }

// parseStatus reads the resident bytes from the text of /proc/PID/status.
func parseStatus(text string) (float64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			return n * 1024, err
		}
	}
	return 0, fmt.Errorf("no VmRSS in %q", text)
}

// clockTick is the kernel's unit of CPU time, the same on all its platforms.
const clockTick = 10 * time.Millisecond

// parseStat reads the CPU time from the text of /proc/PID/stat.
func parseStat(text string) (time.Duration, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:]) // from the third on
	if len(fields) < 13 {
		return 0, fmt.Errorf("no CPU time in %q", text)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	return time.Duration(user+system) * clockTick, nil
}

// cpuOf is the CPU time of a process so far.
func cpuOf(p *process.Process) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		return 0, fmt.Errorf("look at %s: %w", p.Name, err)
	}
	return parseStat(string(text))
}

// usageOf looks at a process that runs. It collects its garbage first.
func usageOf(ctx context.Context, p *process.Process) (u usage, err error) {
	if u.cpu, err = cpuOf(p); err != nil {
		return u, err
	}
	if err := collectGarbage(ctx, p); err != nil {
		return u, err
	}
	for name, to := range map[string]*float64{
		"go_memstats_heap_alloc_bytes": &u.live, "go_memstats_stack_inuse_bytes": &u.stacks, "go_goroutines": &u.goroutines,
	} {
		if *to, err = p.Metric(ctx, name); err != nil {
			return u, err
		}
	}
	u.live += u.stacks
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return u, fmt.Errorf("look at %s: %w", p.Name, err)
	}
	u.rss, err = parseStatus(string(text))
	return u, err
}

// collectGarbage has a process collect its garbage, twice: what a finalizer or a pool held goes with the second time.
func collectGarbage(ctx context.Context, p *process.Process) error {
	for range 2 {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.HTTP+"/debug/pprof/heap?gc=1", http.NoBody)
		if err != nil {
			return fmt.Errorf("collect garbage of %s: %w", p.Name, err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return fmt.Errorf("collect garbage of %s: %w", p.Name, err)
		}
		_, err = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		if err != nil {
			return fmt.Errorf("collect garbage of %s: %w", p.Name, err)
		}
	}
	return nil
}

// costOf looks at all processes of a cluster.
func costOf(ctx context.Context, c *process.Cluster) (out cost, err error) {
	for _, g := range []struct {
		of []*process.Process
		to *usage
	}{{c.Brokers, &out.broker}, {c.Bookies, &out.bookie}, {c.Etcds, &out.etcd}} {
		for _, p := range g.of {
			u, err := usageOf(ctx, p)
			if err != nil {
				return out, err
			}
			*g.to = g.to.plus(u)
		}
	}
	out.at = time.Now()
	return out, nil
}

// cpuNow is the CPU time of a cluster so far, without disturbing it.
func cpuNow(c *process.Cluster) (out cost, err error) {
	for _, g := range []struct {
		of []*process.Process
		to *usage
	}{{c.Brokers, &out.broker}, {c.Bookies, &out.bookie}, {c.Etcds, &out.etcd}} {
		for _, p := range g.of {
			d, err := cpuOf(p)
			if err != nil {
				return out, err
			}
			g.to.cpu += d
		}
	}
	out.at = time.Now()
	return out, nil
}

// cores is how many processors were busy between two looks.
func cores(from, to cost, of func(cost) usage) float64 {
	return (of(to).cpu - of(from).cpu).Seconds() / to.at.Sub(from.at).Seconds()
}

// records are what a cluster keeps in etcd.
type records struct {
	keys, bytes int64
	kinds       map[string]int64 // bytes by kind of record
	file        float64          // bytes of etcd's file that are in use, with its own overhead and what is not compacted yet
}

const (
	prefix   = "/penstock/penstock/"
	keysPage = 5000
)

// recordsOf counts the live records.
func recordsOf(ctx context.Context, c *process.Cluster, k *clientv3.Client) (out records, err error) {
	out.kinds = make(map[string]int64)
	for from := prefix; ; {
		r, err := k.Get(ctx, from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(prefix)), clientv3.WithLimit(keysPage), clientv3.WithSerializable())
		if err != nil {
			return out, fmt.Errorf("count records in etcd: %w", err)
		}
		for _, kv := range r.Kvs {
			n := int64(len(kv.Key) + len(kv.Value))
			out.keys++
			out.bytes += n
			out.kinds[kindOf(strings.TrimPrefix(string(kv.Key), prefix))] += n
		}
		if !r.More {
			break
		}
		from = string(r.Kvs[len(r.Kvs)-1].Key) + "\x00"
	}
	out.file, err = c.Etcds[0].Metric(ctx, "etcd_mvcc_db_total_size_in_use_in_bytes")
	return out, err
}

// kindOf is the first word of a key, after "view".
func kindOf(key string) string {
	kind, _, _ := strings.Cut(strings.TrimPrefix(key, "view/"), "/")
	return kind
}
