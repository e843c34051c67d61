package publish

import (
	"context"
	"net"
	"sync"
	"time"
)

// firstDial lets a context end the first connection attempt: nats.Connect takes
// none. After done the context no longer matters, because reconnects outlive it.
type firstDial struct {
	timeout time.Duration

	mu    sync.Mutex // guards what follows: reconnects dial on another goroutine
	ctx   context.Context
	stops []func() bool
}

func newFirstDial(ctx context.Context, timeout time.Duration) *firstDial {
	return &firstDial{ctx: ctx, timeout: timeout}
}

func (d *firstDial) done() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, stop := range d.stops {
		stop()
	}
	d.ctx, d.stops = nil, nil
}

// Dial implements nats.CustomDialer.
func (d *firstDial) Dial(network, address string) (net.Conn, error) {
	d.mu.Lock()
	ctx := d.ctx
	d.mu.Unlock()
	dialer := net.Dialer{Timeout: d.timeout}
	if ctx == nil {
		return dialer.Dial(network, address)
	}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	d.mu.Lock()
	d.stops = append(d.stops, stop)
	d.mu.Unlock()
	return conn, nil
}
