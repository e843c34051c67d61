package jetstream

import (
	"context"
	"net"
	"sync"
	"time"
)

// dialer makes the client's connections. It lets a context end the first attempt,
// which nats.Connect itself cannot, and keeps the newest connection, see Socket.
type dialer struct {
	timeout time.Duration

	mu     sync.Mutex // guards what follows: reconnects dial on another goroutine
	ctx    context.Context
	stops  []func() bool
	newest *Socket
}

func newDialer(ctx context.Context, timeout time.Duration) *dialer {
	return &dialer{ctx: ctx, timeout: timeout}
}

// connected is called after the first attempt: from then on its context no longer
// matters, because reconnects outlive it.
func (d *dialer) connected() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, stop := range d.stops {
		stop()
	}
	d.ctx, d.stops = nil, nil
}

// Dial implements nats.CustomDialer.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	d.mu.Lock()
	ctx := d.ctx
	d.mu.Unlock()
	first := ctx != nil
	if !first {
		ctx = context.Background()
	}
	conn, err := (&net.Dialer{Timeout: d.timeout}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if first {
		d.stops = append(d.stops, context.AfterFunc(ctx, func() { _ = conn.Close() }))
	}
	d.newest = &Socket{Conn: conn}
	return d.newest, nil
}

func (d *dialer) current() *Socket {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.newest
}
