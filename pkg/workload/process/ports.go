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

// freeAddr returns a loopback address that nothing listens on, and that this program did not hand out before.
func freeAddr(ctx context.Context) (string, error) {
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
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			continue
		}
		ports.given[port] = true
		return addr, nil
	}
	return "", errors.New("no free port on the loopback interface")
}
