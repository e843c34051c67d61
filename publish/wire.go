package publish

import (
	"fmt"
	"net"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
)

// wireBuffer is how much is gathered before it is written, in bytes.
const wireBuffer = 256 << 10

// wire writes messages into a connection. Over a plain one it writes the protocol
// itself, many messages at a time: the client would encode each header block out of a
// map, and write whenever its own goroutine gets to run.
type wire struct {
	nc   *nats.Conn
	sock *jetstream.Socket // nil where the client has to write
	held func() error      // see PublisherConfig.Held
	buf  []byte
}

// publish writes a message, whose header block is in two parts, or keeps it for the next
// flush. Nothing of it is used after the return.
func (w *wire) publish(subject string, reply, header, more, body []byte) error {
	if w.sock == nil {
		if len(more) > 0 {
			header = slices.Concat(header, more)
		}
		return w.publishByClient(subject, reply, header, body)
	}
	b := w.buf
	if len(header) > 0 {
		b = append(b, 'H')
	}
	b = append(b, "PUB "...)
	b = append(b, subject...)
	b = append(b, ' ')
	if len(reply) > 0 {
		b = append(b, reply...)
		b = append(b, ' ')
	}
	if len(header) > 0 {
		b = strconv.AppendInt(b, int64(len(header)+len(more)), 10)
		b = append(b, ' ')
	}
	b = strconv.AppendInt(b, int64(len(header)+len(more)+len(body)), 10)
	b = append(b, "\r\n"...)
	b = append(b, header...)
	b = append(b, more...)
	w.buf = b
	if len(b)+len(body)+len("\r\n") > wireBuffer {
		return w.write(net.Buffers{b, body, []byte("\r\n")})
	}
	b = append(b, body...)
	w.buf = append(b, "\r\n"...)
	return nil
}

func (w *wire) publishByClient(subject string, reply, header, body []byte) error {
	m := &nats.Msg{Subject: subject, Reply: string(reply), Data: body}
	if len(header) > 0 {
		var err error
		if m.Header, err = nats.DecodeHeadersMsg(header); err != nil {
			return err
		}
	}
	if err := w.check(); err != nil {
		return err
	}
	return w.nc.PublishMsg(m)
}

// flush writes the buffer.
func (w *wire) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	return w.write(net.Buffers{w.buf})
}

func (w *wire) empty() bool { return len(w.buf) == 0 }

// forget drops it.
func (w *wire) forget() { w.buf = w.buf[:0] }

func (w *wire) check() error {
	if w.held == nil {
		return nil
	}
	return w.held()
}

func (w *wire) write(parts net.Buffers) error {
	w.buf = w.buf[:0]
	if err := w.check(); err != nil {
		return err
	}
	if err := w.sock.WriteBuffers(parts); err != nil {
		return fmt.Errorf("%w: %w", nats.ErrDisconnected, err)
	}
	return nil
}
