package stream

import (
	"encoding/binary"
	"fmt"
	"io"
)

const (
	// messageHead is a message's type and the length of what follows, itself included.
	messageHead = 1 + 4
	// plainMessage is the length up to which a message always goes through as it is.
	plainMessage = 64 << 10
	// abridgeKept is how much memory for abridged messages outlives them.
	abridgeKept = 1 << 20
)

// abridger lies between the connection and pgproto3, which collects every message as a
// whole. It follows the framing and hands everything on as it is, except for CopyData
// messages that are longer than most: those are read as they arrive, and a short one is
// handed on in their place. It is the reader's own.
type abridger struct {
	r    io.Reader
	most int
	// shorten reads a message of the plugin, of n bytes, and appends a short one.
	shorten func(dst []byte, r io.Reader, n int) ([]byte, error)

	left  int               // of the message that is going through
	head  [messageHead]byte // of the next one, where it came in two pieces
	heads int               // how much of head there is
	long  int               // of the message to shorten, its head taken; 0 where there is no such
	ahead []byte            // bytes read behind that head
	out   []byte            // what goes out next
	buf   []byte            // out's memory
	err   error             // a long message broke off in its middle
}

// Read implements io.Reader.
func (a *abridger) Read(p []byte) (int, error) {
	for a.err == nil {
		switch {
		case len(a.out) > 0:
			n := copy(p, a.out)
			a.out = a.out[n:]
			return n, nil
		case a.long > 0:
			a.err = a.abridge()
		case a.heads > 0:
			n, err := io.ReadFull(source{a}, a.head[a.heads:])
			if a.heads += n; err != nil {
				return 0, err
			}
			a.heads = 0
			if a.begin(a.head[:]) {
				a.out = a.head[:]
			}
		default:
			n, err := source{a}.Read(p)
			if n = a.follow(p[:n]); n > 0 || err != nil {
				return n, err
			}
		}
	}
	return 0, a.err
}

// source is what comes from the connection.
type source struct{ *abridger }

func (s source) Read(p []byte) (int, error) {
	if len(s.ahead) == 0 {
		return s.r.Read(p)
	}
	n := copy(p, s.ahead)
	s.ahead = s.ahead[n:]
	return n, nil
}

// follow returns how many of the bytes go through as they are. The rest is kept.
func (a *abridger) follow(p []byte) int {
	for i := 0; ; {
		n := min(a.left, len(p)-i)
		a.left -= n
		if i += n; i == len(p) {
			return i
		}
		if len(p)-i < messageHead {
			a.heads = copy(a.head[:], p[i:])
			return i
		}
		if !a.begin(p[i:]) {
			// In the order of these two: ahead may be what p was copied from.
			a.ahead = append(append([]byte(nil), p[i+messageHead:]...), a.ahead...)
			return i
		}
		i += messageHead
	}
}

// begin takes a message's head and reports whether the message goes through as it is.
func (a *abridger) begin(head []byte) bool {
	n := int(binary.BigEndian.Uint32(head[1:])) - 4
	if head[0] == 'd' && n > max(a.most, plainMessage) {
		a.long = n
		return false
	}
	a.left = max(n, 0) // pgproto3 refuses a length that cannot be
	return true
}

// abridge puts a short message in the place of a long one.
func (a *abridger) abridge() error {
	if cap(a.buf) > abridgeKept {
		a.buf = nil
	}
	buf := append(a.buf[:0], 'd', 0, 0, 0, 0)
	buf = append(buf, make([]byte, xlogDataHeader)...)
	if _, err := io.ReadFull(source{a}, buf[messageHead:]); err != nil {
		return err
	}
	if buf[messageHead] != 'w' || a.shorten == nil {
		return fmt.Errorf("replication message %q of %d bytes", buf[messageHead], a.long)
	}
	buf, err := a.shorten(buf, source{a}, a.long-xlogDataHeader)
	if err != nil {
		return err
	}
	binary.BigEndian.PutUint32(buf[1:], uint32(len(buf)-1))
	a.long, a.buf, a.out = 0, buf, buf
	return nil
}
