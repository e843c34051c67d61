package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Proxy forwards TCP connections on loopback, and fails in the ways that
// networks do.
type Proxy struct {
	target   string
	port     int
	listener net.Listener
	// running counts the goroutines.
	running sync.WaitGroup

	// mu guards the fields below; changed is signalled when they change.
	mu      sync.Mutex
	changed *sync.Cond
	conns   map[net.Conn]struct{}
	paused  bool
	refused bool
	delay   time.Duration
	dropAt  string
	closed  bool
}

// StartProxy forwards a new loopback address to target, a host:port.
func StartProxy(target string) (*Proxy, error) {
	l, port, err := takeListener()
	if err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	p := &Proxy{target: target, port: port, listener: l, conns: make(map[net.Conn]struct{})}
	p.changed = sync.NewCond(&p.mu)
	p.running.Go(p.accept)
	return p, nil
}

// Addr is the proxy's host:port.
func (p *Proxy) Addr() string { return loopback(p.port) }

// Drop closes the present connections; new ones are served.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop()
}

// Cut closes the present connections, and new ones as they come, until
// [Proxy.Resume].
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = true
	p.drop()
}

// Pause makes the proxy a black hole: connections stay open and are accepted,
// and no byte passes until [Proxy.Resume], which loses none.
func (p *Proxy) Pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = true
}

// Slow makes every piece of at most 32 KiB wait for so long, one after the other,
// each way: latency, and a bandwidth.
func (p *Proxy) Slow(delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = delay
}

func (p *Proxy) slowness() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delay
}

// DropAt closes the connections each time a client sends a text.
func (p *Proxy) DropAt(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropAt = text
}

// dropsAt closes the connections where that is wanted at these bytes.
func (p *Proxy) dropsAt(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dropAt == "" || !bytes.Contains(b, []byte(p.dropAt)) {
		return false
	}
	p.drop()
	return true
}

// Resume ends [Proxy.Pause], [Proxy.Cut], [Proxy.Slow] and [Proxy.DropAt].
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused, p.refused, p.delay, p.dropAt = false, false, 0, ""
	p.changed.Broadcast()
}

// Close ends the proxy and its connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.drop()
	p.mu.Unlock()
	err := p.listener.Close()
	p.running.Wait()
	freePort(p.port)
	return err
}

// drop closes every connection. p.mu is held.
func (p *Proxy) drop() {
	for conn := range p.conns {
		abort(conn)
	}
	clear(p.conns)
	p.changed.Broadcast()
}

// abort makes the peer see a reset, not an orderly end.
func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		if !p.admit(client) {
			abort(client)
			continue
		}
		p.running.Go(func() { p.serve(client) })
	}
}

// admit registers a connection unless there are to be none.
func (p *Proxy) admit(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refused {
		return false
	}
	p.conns[conn] = struct{}{}
	return true
}

func (p *Proxy) serve(client net.Conn) {
	defer p.leave(client)
	if !p.pass(client) {
		return
	}
	upstream, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer p.leave(upstream)
	if !p.admit(upstream) {
		return
	}
	var pumps sync.WaitGroup
	pumps.Go(func() { p.pump(upstream, client) })
	pumps.Go(func() { p.pump(client, upstream) })
	pumps.Wait()
}

func (p *Proxy) leave(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
	_ = conn.Close()
}

// pass waits while the proxy is paused, and reports whether the connection is
// still wanted.
func (p *Proxy) pass(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if _, ok := p.conns[conn]; !ok {
			return false
		}
		if !p.paused {
			return true
		}
		p.changed.Wait()
	}
}

// pump moves bytes one way until either side ends; the half that it closes
// tells the other pump when its turn has come.
func (p *Proxy) pump(dst, src net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if !p.pass(src) {
			break
		}
		if d := p.slowness(); d > 0 {
			time.Sleep(d)
		}
		if n > 0 && p.dropsAt(buf[:n]) {
			break
		}
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				err = errors.Join(err, werr)
			}
		}
		if err != nil {
			break
		}
	}
	if half, ok := dst.(*net.TCPConn); ok {
		_ = half.CloseWrite()
	}
}
