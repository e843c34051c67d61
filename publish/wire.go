package publish

import (
	"net"
	"strconv"

	"github.com/nats-io/nats.go"
)

// wireBuffer is how much is gathered before it is written, in bytes.
const wireBuffer = 64 << 10

// wire writes messages into a connection. Over a plain one it writes the protocol
// itself, many messages at a time: the client would encode each header block out of a
// map, and write whenever its own goroutine gets to run.
type wire struct {
	nc   *nats.Conn
	sock *socket // nil where the client has to write
	buf  []byte
}

// publish writes a message, or keeps it for the next flush. Nothing of it is used
// after the return.
func (w *wire) publish(subject string, reply, header, body []byte) error {
	if w.sock == nil {
		h, err := nats.DecodeHeadersMsg(header)
		if err != nil {
			return err
		}
		return w.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: string(reply), Header: h, Data: body})
	}
	b := append(w.buf, "HPUB "...)
	b = append(b, subject...)
	b = append(b, ' ')
	b = append(b, reply...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(len(header)), 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(len(header)+len(body)), 10)
	b = append(b, "\r\n"...)
	b = append(b, header...)
	w.buf = b
	if len(b)+len(body)+len("\r\n") > wireBuffer {
		return w.write(net.Buffers{b, body, []byte("\r\n")})
	}
	b = append(b, body...)
	w.buf = append(b, "\r\n"...)
	return nil
}

// flush writes what was kept.
func (w *wire) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	return w.write(net.Buffers{w.buf})
}

func (w *wire) write(parts net.Buffers) error {
	w.buf = w.buf[:0]
	return w.sock.writev(parts)
}
