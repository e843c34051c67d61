package jetstream

import (
	"net"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// writeTimeout is how long a server may not read before it counts as lost.
const writeTimeout = 10 * time.Second

// Socket is a connection that two write to: the client, and a publisher past it. Each
// Write of the client's holds whole commands, and so does each of the publisher's.
type Socket struct {
	net.Conn
	mu sync.Mutex // held during a write
}

// PlainSocket is what carries a connection's commands as they are: nil where that is
// TLS or a websocket, or somebody else has dialed.
func PlainSocket(nc *nats.Conn) *Socket {
	d, ok := nc.Opts.CustomDialer.(*dialer)
	if !ok || strings.HasPrefix(nc.ConnectedUrl(), "ws") {
		return nil
	}
	if _, err := nc.TLSConnectionState(); err != nats.ErrConnectionNotTLS {
		return nil
	}
	return d.current()
}

// CutWrite makes a write fail that is waiting for the server to read.
func CutWrite(nc *nats.Conn) {
	if d, ok := nc.Opts.CustomDialer.(*dialer); ok {
		if s := d.current(); s != nil {
			_ = s.Conn.SetWriteDeadline(time.Now())
		}
	}
}

// Write implements net.Conn.
func (s *Socket) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.Conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	n, err := s.Conn.Write(p)
	s.failed(err)
	return n, err
}

// WriteBuffers writes the parts one after the other, and nothing of the client's between
// them.
func (s *Socket) WriteBuffers(parts net.Buffers) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.Conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := parts.WriteTo(s.Conn)
	s.failed(err)
	return err
}

// failed closes the connection: half a command may have been written, and whatever
// follows would be taken for the rest of it.
func (s *Socket) failed(err error) {
	if err != nil {
		_ = s.Conn.Close()
	}
}

// SetWriteDeadline does nothing: each write has its own.
func (s *Socket) SetWriteDeadline(time.Time) error { return nil }

// SetDeadline sets what is left of it.
func (s *Socket) SetDeadline(t time.Time) error { return s.Conn.SetReadDeadline(t) }
