package main

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// httpConnections is how many connections there may be at once: scrapes and probes need a handful.
const httpConnections = 100

// connLimit closes the oldest connection where a new one is one too many. To refuse the new one would
// let idle connections keep out the probes, and with them kill the relay.
type connLimit struct {
	most int

	mu   sync.Mutex
	open []net.Conn // the oldest first
}

// track is the server's ConnState.
func (l *connLimit) track(c net.Conn, state http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch state {
	case http.StateNew:
		if l.open = append(l.open, c); len(l.open) > l.most {
			_ = l.open[0].Close()
			l.open = slices.Delete(l.open, 0, 1)
		}
	case http.StateClosed, http.StateHijacked:
		l.open = slices.DeleteFunc(l.open, func(o net.Conn) bool { return o == c })
	}
}
