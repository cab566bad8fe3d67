package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is the state of the machine before the first run.
type machine struct {
	CPUs       int    `json:"cpus"`
	Processor  string `json:"processor"`
	MemoryMiB  uint64 `json:"memoryMiB"`
	Kernel     string `json:"kernel"`
	FileSystem string `json:"fileSystem"`
	Device     string `json:"device"`
	FreeMiB    uint64 `json:"freeMiB"`
	Load       string `json:"load"`
	Go         string `json:"go"`
	NATS       string `json:"nats"`
}

// describeMachine tells what can be found out; what cannot stays empty.
func describeMachine(ctx context.Context, dir, programs string) machine {
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version(), Processor: processor(), Load: loadAverage()}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	var memory unix.Sysinfo_t
	if unix.Sysinfo(&memory) == nil {
		m.MemoryMiB = memory.Totalram * uint64(memory.Unit) / mebibyte
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		m.FreeMiB = fs.Bavail * uint64(fs.Bsize) / mebibyte
	}
	m.Device, m.FileSystem = mountOf(dir)
	if out, err := exec.CommandContext(ctx, filepath.Join(programs, "nats-server"), "--version").Output(); err == nil { //nolint:gosec // built here
		m.NATS = strings.TrimSpace(string(out))
	}
	return m
}

func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// loadAverage is over 1, 5 and 15 minutes.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(3, len(fields))], " ")
}

// mountOf is the device and the type of the file system that a directory is on: the longest mount point before it.
func mountOf(dir string) (device, fs string) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", ""
	}
	defer f.Close()
	longest := ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 {
			continue
		}
		at := fields[1]
		below := at == "/" || dir == at || strings.HasPrefix(dir, at+"/")
		if below && len(at) >= len(longest) {
			longest, device, fs = at, fields[0], fields[2]
		}
	}
	return device, fs
}

func (m machine) text() string {
	return fmt.Sprintf("Machine: %d CPUs (%s), %d MiB of memory, Linux %s, %s on %s with %d MiB free, %s, %s. Load average before: %s.\n",
		m.CPUs, m.Processor, m.MemoryMiB, m.Kernel, m.FileSystem, m.Device, m.FreeMiB, m.Go, m.NATS, m.Load)
}
