package stream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	walpg "github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// lagging takes rows, and tells for each whether it was one of a backlog.
type lagging struct {
	s    *Session
	row  func(id string, backlog bool)
	idle func()
	dry  int
}

func (l *lagging) Row(_ context.Context, ev *outbox.Event, txn *Txn) error {
	l.row(string(ev.Values[outbox.ID]), l.s.source.pause > 0)
	return nil
}

func (l *lagging) Idle(context.Context) error {
	l.idle()
	return nil
}

func (l *lagging) Commit() {}

func (l *lagging) Described(context.Context, bool) error { return nil }

func (l *lagging) Dry() { l.dry++ }

// TestGatheringEnds: rows that have waited are read with pauses, and as soon as the
// server has nothing more there are none.
func TestGatheringEnds(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		exec := func(sql string) {
			t.Helper()
			if err := pg.Exec(t.Context(), "postgres", sql); err != nil {
				t.Fatal(err)
			}
		}
		exec(`CREATE TABLE box (id bigint PRIMARY KEY, event_type text, payload jsonb); CREATE PUBLICATION box FOR TABLE box`)
		exec(`SELECT pg_create_logical_replication_slot('box', 'pgoutput')`)
		exec(`INSERT INTO box SELECT n, 'x', '{}' FROM generate_series(1, 5000) n`)
		time.Sleep(backlogAge + 50*time.Millisecond)

		layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload"})
		if err != nil {
			t.Fatal(err)
		}
		table := &outbox.Table{Schema: "public", Name: "box", Layout: layout}
		s, err := Open(t.Context(), Config{Server: walpg.Config{URL: pg.URL("postgres")}, Slot: "box", Publication: "box", Tables: []*outbox.Table{table}, Log: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close(false)
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		var writer sync.WaitGroup
		late, idle := 0, 0
		h := &lagging{s: s}
		h.row = func(id string, backlog bool) {
			if backlog {
				late++
			}
			if late > 0 && !backlog { // one that the machine did not hold up is enough
				if idle == 0 {
					t.Errorf("row %s is not taken for one of the backlog", id)
				}
				cancel()
			}
		}
		h.idle = func() {
			if s.source.pause > 0 {
				t.Error("the server has sent all, and the reader still pauses")
			}
			if idle++; idle == 1 {
				writer.Go(func() {
					for n := 5001; ctx.Err() == nil; n++ {
						if err := pg.Exec(ctx, "postgres", fmt.Sprintf(`INSERT INTO box VALUES (%d, 'x', '{}')`, n)); err != nil && ctx.Err() == nil {
							t.Error(err)
							return
						}
					}
				})
			}
		}
		defer writer.Wait()
		defer cancel()
		if err := s.Run(ctx, h, 1<<20); err != nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Fatalf("%v, after %d late rows and %d times idle: %v", err, late, idle, ctx.Err())
		}
		if late < 5000 || h.dry == 0 {
			t.Errorf("%d rows of the backlog were read with pauses, of 5000; dry %d times", late, h.dry)
		}
	})
}

// TestGathererPauses: the pause is between two reads of all that there is.
func TestGathererPauses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		for range 200 {
			if _, err := conn.Write([]byte("message")); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	var g *gatherer
	dial := dialGathering((&net.Dialer{}).DialContext, &g)
	conn, err := dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	g.late(time.Hour)
	dry := 0
	g.dry = func() { dry++ }
	begun, buf := time.Now(), make([]byte, 64<<10)
	for read := 0; read < 200*len("message"); {
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		read += n
	}
	if most := int(time.Since(begun)/gatherPause) + 2; dry > most || dry < 2 {
		t.Errorf("%d reads in %s, want at most %d", dry, time.Since(begun), most)
	}
}
