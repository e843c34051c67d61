package testenv

import (
	"net"
	"testing"
)

// TestPortsAreTheProcesssOwn: the block of a port is guarded, so that no other process takes it
// before a server listens there, and a port that is given back rests.
func TestPortsAreTheProcesssOwn(t *testing.T) {
	port, err := takePort()
	if err != nil {
		t.Fatal(err)
	}
	guard := port - (port-firstPort)%blockSize
	if l, err := net.Listen("tcp4", loopback(guard)); err == nil {
		l.Close()
		t.Errorf("port %d is taken, and nothing listens on %d", port, guard)
	}
	freePort(port)
	for range fewest {
		next, err := takePort()
		if err != nil {
			t.Fatal(err)
		}
		defer freePort(next)
		if next == port {
			t.Errorf("port %d was given back, and taken again at once", port)
		}
	}
}
