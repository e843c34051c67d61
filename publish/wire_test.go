package publish

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestWire has a publisher and the client write into one connection, small messages and
// large ones, one by one and in batches: each arrives whole, over every kind of connection.
func TestWire(t *testing.T) {
	ca := testenv.NewAuthority(t)
	cert, key := ca.Issue(t)
	for name, tt := range map[string]struct {
		config string
		conn   jetstream.ConnConfig
		plain  bool
	}{
		"plain":     {plain: true},
		"TLS":       {config: fmt.Sprintf(`tls { cert_file: %q, key_file: %q }`, cert, key), conn: jetstream.ConnConfig{TLS: jetstream.TLSConfig{CA: ca.File}}},
		"websocket": {config: `websocket { listen: "127.0.0.1:-1", no_tls: true }`},
	} {
		for _, kind := range []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic} {
			t.Run(name+"/"+string(kind), func(t *testing.T) {
				t.Parallel()
				n := testenv.NewNATS(t, testenv.NATSOptions{Config: tt.config})
				conn := tt.conn
				conn.URL = n.URL()
				if name == "websocket" {
					conn.URL = n.Server().WebsocketURL()
				}
				r := newPublisherRigOver(t, n, conn, func(c *natsjs.StreamConfig) {
					c.AllowBatchPublish, c.AllowAtomicPublish = true, true
					c.AllowDirect = true // GetMsg has the payload as it is, and not in JSON
				})
				r.cfg.Batching = kind
				l := r.publisher()
				if got := l.wire.sock != nil; got != tt.plain {
					t.Errorf("past the client: %v, want %v", got, tt.plain)
				}
				stop := beside(t, r.nc)
				const rows = 400
				payload := func(i int) string { // up to 160 kB
					if i%3 > 0 {
						return strings.Repeat("x", i%7*i)
					}
					return strings.Repeat("x", i%7*i*70)
				}
				for i := range rows {
					r.must(l.Send(t.Context(), r.event(i, payload(i)), i))
					l.EndTransaction()
				}
				r.must(l.Flush())
				r.settleAll(l, rows)
				stop()
				s, err := r.js.Stream(t.Context(), "EVENTS")
				r.must(err)
				for i := range rows {
					m, err := s.GetMsg(t.Context(), uint64(i+1))
					r.must(err)
					id, _ := outbox.ParseMessageID("src", m.Header.Get(nats.MsgIdHdr))
					if id.ID != fmt.Sprint(i) || string(m.Data) != payload(i) {
						t.Fatalf("sequence %d holds row %s with %d bytes, want row %d with %d", i+1, id.ID, len(m.Data), i, len(payload(i)))
					}
					if after := m.Header.Get(nats.ExpectedLastSeqHdr); after != fmt.Sprint(i) && (kind != jetstream.BatchAtomic || after != "" || m.Header.Get(batchIDHeader) == "") {
						t.Fatalf("sequence %d was expected behind %q, batch %q", i+1, after, m.Header.Get(batchIDHeader))
					}
				}
			})
		}
	}
}

// beside publishes through the client until the end, and sees that all of it arrives.
func beside(t *testing.T, nc *nats.Conn) (stop func()) {
	t.Helper()
	body := bytes.Repeat([]byte("y"), 5000)
	var got atomic.Int64
	sub := must(nc.Subscribe("beside.*", func(m *nats.Msg) {
		if bytes.Equal(m.Data, body) {
			got.Add(1)
		}
	}))(t)
	_ = sub.SetPendingLimits(-1, -1)
	done := make(chan struct{})
	var sent atomic.Int64
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if err := nc.Publish(fmt.Sprintf("beside.%d", i), body); err != nil {
					t.Error(err)
					return
				}
				sent.Add(1)
				time.Sleep(time.Millisecond)
			}
		})
	}
	return func() {
		close(done)
		all.Wait()
		if err := nc.FlushTimeout(10 * time.Second); err != nil {
			t.Error(err)
		}
		for until := time.Now().Add(10 * time.Second); got.Load() < sent.Load() && time.Now().Before(until); {
			time.Sleep(time.Millisecond)
		}
		if got.Load() != sent.Load() || sent.Load() == 0 {
			t.Errorf("%d of the client's own messages arrived of %d", got.Load(), sent.Load())
		}
	}
}
