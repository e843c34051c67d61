package stream

import (
	"context"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// gatherPause is the longest time between two looks at the connection while there is a
	// backlog. A walsender writes each message by itself, and pays for waking a reader
	// that waits: one that comes late finds many, and drains about twice as fast.
	gatherPause = 10 * time.Millisecond
	// backlogAge is how long after its commit a message has to leave the server for it
	// to be one of a backlog. The pause is at most half of that time, so that it is never
	// most of what a message has waited for, as where commits take long to be flushed.
	backlogAge = 10 * time.Millisecond
	// gatherBuffer is how much is read at once, in bytes.
	gatherBuffer = 256 << 10
)

// gatherer is the connection that a session reads from. It lies below TLS, where
// each message is one record.
type gatherer struct {
	net.Conn
	buf  []byte // bytes read and not taken
	full [gatherBuffer]byte

	// The reader's own, see Session.Run: dry is called before the connection is read,
	// when everything that had arrived is taken.
	dry func()
	// pause is the time between two looks, 0 where what arrives was committed just now.
	pause   time.Duration
	pauses  bool      // a local socket holds too little to be left alone
	more    bool      // the last read did not take all there was
	emptied time.Time // when one last did
}

// late notes how long after its commit a message has left the server.
func (g *gatherer) late(by time.Duration) {
	g.pause = 0
	if by > backlogAge {
		g.pause = min(by/2, gatherPause)
	}
}

// dialGathering makes a DialFunc, and keeps what it has dialed last.
func dialGathering(dial pgconn.DialFunc, last **gatherer) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		_, tcp := conn.(*net.TCPConn)
		*last = &gatherer{Conn: conn, pauses: tcp, dry: func() {}}
		return *last, nil
	}
}

// Read implements net.Conn.
func (g *gatherer) Read(p []byte) (int, error) {
	if len(g.buf) == 0 {
		if !g.more {
			g.dry()
		}
		if g.pause > 0 && g.pauses {
			time.Sleep(g.pause - time.Since(g.emptied))
		}
		n, err := g.Conn.Read(g.full[:])
		if g.more = n == len(g.full); !g.more {
			g.emptied = time.Now()
		}
		if n == 0 {
			return 0, err
		}
		g.buf = g.full[:n]
	}
	n := copy(p, g.buf)
	g.buf = g.buf[n:]
	return n, nil
}
