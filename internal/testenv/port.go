package testenv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are taken from below the range that systems give to outgoing connections. From inside it,
// another process's connection could occupy the port while the server is restarted, and a client
// that keeps dialling the stopped server would one day connect to itself.
//
// They are taken in blocks: a process listens on the first port of a block as long as it lives, and
// the others are its own, also between the moment when one is found free and that when a server
// listens on it.
const (
	firstPort = 10240
	lastPort  = 32767
	blockSize = 128
	// fewest is how many ports stay unused, so that one that is given back has rested before a
	// server has it again: a client of the server before may still dial it.
	fewest = 100
)

// ports are those of this process.
var ports struct {
	mu     sync.Mutex
	free   []int // the one that has rested longest comes first
	guards []net.Listener
}

// takePort reserves a free loopback port until [freePort].
func takePort() (int, error) {
	l, port, err := takeListener()
	if err != nil {
		return 0, err
	}
	return port, l.Close()
}

// TakeAddress reserves a free address on loopback for a program that is started again and again. No other
// program's outgoing connection gets its port.
func TakeAddress() (string, error) {
	port, err := takePort()
	return loopback(port), err
}

// takeListener listens on such a port.
func takeListener() (l net.Listener, port int, err error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	for {
		if len(ports.free) < fewest {
			err = errors.Join(err, takeBlock())
		}
		if len(ports.free) == 0 {
			return nil, 0, fmt.Errorf("find free port: %w", err)
		}
		port, ports.free = ports.free[0], ports.free[1:]
		if l, err = net.Listen("tcp4", loopback(port)); err == nil {
			return l, port, nil
		} // else a program that knows nothing of blocks has it
	}
}

func takeBlock() error {
	for _, n := range rand.Perm((lastPort - firstPort + 1) / blockSize) {
		first := firstPort + n*blockSize
		guard, err := net.Listen("tcp4", loopback(first))
		if err != nil {
			continue
		}
		ports.guards = append(ports.guards, guard)
		for port := first + 1; port < first+blockSize; port++ {
			ports.free = append(ports.free, port)
		}
		return nil
	}
	return errors.New("every block of ports is taken")
}

func freePort(port int) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	ports.free = append(ports.free, port)
}

func loopback(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
