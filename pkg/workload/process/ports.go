package process

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// ports hands out free ports of the loopback interface. They lie below the range from which systems take ports for
// outgoing connections, which otherwise could take one between its choice and its use, or while its process is down.
var ports struct {
	mu    sync.Mutex
	given map[int]bool
}

const (
	lowestPort  = 12_000
	highestPort = 32_000
	portTries   = 1000
)

const loopback = "127.0.0.1"

// freePort returns a port that nothing listens on, on the loopback interface, and that this program did not hand out
// before.
func freePort(ctx context.Context) (string, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.given == nil {
		ports.given = make(map[int]bool)
	}
	for range portTries {
		port := lowestPort + rand.IntN(highestPort-lowestPort) //nolint:gosec // any will do
		if ports.given[port] {
			continue
		}
		text := strconv.Itoa(port)
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(loopback, text))
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			continue
		}
		ports.given[port] = true
		return text, nil
	}
	return "", errors.New("no free port on the loopback interface")
}
