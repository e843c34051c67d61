package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are taken from below the range that systems give to outgoing
// connections. From inside it, another process's connection could occupy the
// port while the server is restarted, and a client that keeps dialling the
// stopped server would one day connect to itself.
const (
	firstPort = 10240
	lastPort  = 32767
)

// ports are those in use by this process, running or not.
var ports struct {
	mu   sync.Mutex
	used map[int]bool
}

// takePort reserves a free loopback port until [freePort].
func takePort() (int, error) {
	l, port, err := takeListener()
	if err != nil {
		return 0, err
	}
	return port, l.Close()
}

// takeListener listens on such a port.
func takeListener() (l net.Listener, port int, err error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.used == nil {
		ports.used = make(map[int]bool)
	}
	for range 100 {
		port = firstPort + rand.IntN(lastPort-firstPort+1)
		if ports.used[port] {
			continue
		}
		if l, err = net.Listen("tcp4", loopback(port)); err != nil {
			continue
		}
		ports.used[port] = true
		return l, port, nil
	}
	return nil, 0, fmt.Errorf("find free port: %w", err)
}

func freePort(port int) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	delete(ports.used, port)
}

func loopback(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
