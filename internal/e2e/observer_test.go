package e2e

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/outbox"
)

// observer holds the confirmed LSN of the relay's slot against what is settled.
type observer struct {
	*rig
	// mu lets one observation run at a time; it guards what follows.
	mu       sync.Mutex
	stream   *audit.Reader
	messages map[string]place // by the row's id, as the stream says
	wal      *witness

	said  map[string]bool
	looks int // observations
	tight int // those with rows committed, but not yet settled
}

// place is a row's place in the WAL: its transaction's commit record, and the
// ordinal of its INSERT there.
type place struct {
	commit outbox.LSN
	n      uint32
}

func (r *rig) observe() *observer {
	r.t.Helper()
	return &observer{rig: r, stream: r.reader(), messages: map[string]place{}, wal: r.newWitness(), said: map[string]bool{}}
}

// glance is a look that does not wait for a server that is away.
func (o *observer) glance(ctx context.Context, when string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_ = o.look(ctx, when)
}

// look compares once. It fails where a server is away.
func (o *observer) look(ctx context.Context, when string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	conn, err := pgx.Connect(ctx, o.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	// The order matters: what is confirmed now has been settled before.
	confirmed, err := readConfirmed(ctx, conn)
	if err != nil {
		return err
	}
	pending, err := readPending(ctx, conn)
	if err != nil {
		return err
	}
	if err := o.stream.Read(ctx, o.message); err != nil {
		return err
	}
	// Up to the flushed end, which lies beyond whatever is confirmed.
	if err := o.wal.read(ctx, conn); err != nil {
		return err
	}
	o.judge(when, confirmed, pending)
	return nil
}

func (o *observer) message(m audit.Message) {
	o.messages[m.ID.ID] = place{m.Position.Commit, m.Position.N}
}

func readConfirmed(ctx context.Context, conn *pgx.Conn) (outbox.LSN, error) {
	var s string
	err := conn.QueryRow(ctx, `SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1`, slot).Scan(&s)
	if err != nil {
		return 0, err
	}
	return outbox.ParseLSN(s)
}

func readPending(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	rows, err := conn.Query(ctx, `SELECT id::text FROM outbox_messages WHERE processed_at IS NULL`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// judge: PostgreSQL sends a transaction again as long as its commit record does
// not lie below the confirmed LSN.
func (o *observer) judge(when string, confirmed outbox.LSN, pending []string) {
	var unmarked, unstored, misplaced findings
	for _, id := range pending {
		if p, known := o.wal.rows[id]; known && p.commit < confirmed {
			unmarked.add("%s at %s", id, p.commit)
		}
	}
	for id := range o.wal.unseen {
		p := o.wal.rows[id]
		m, stored := o.messages[id]
		switch {
		case stored && m != p:
			misplaced.add("%s is at %s/%d, its message says %s/%d", id, p.commit, p.n, m.commit, m.n)
		case !stored && p.commit < confirmed:
			unstored.add("%s at %s", id, p.commit)
		}
		if stored {
			delete(o.wal.unseen, id)
		}
	}
	o.looks++
	if len(pending)+len(o.wal.unseen) > 0 {
		o.tight++
	}
	o.say(when, confirmed, "rows below the confirmed LSN are not marked", unmarked)
	o.say(when, confirmed, "rows below the confirmed LSN are not in the stream", unstored)
	o.say(when, confirmed, "messages say another position than the WAL", misplaced)
}

// say reports a kind of finding once: what is wrong stays wrong.
func (o *observer) say(when string, confirmed outbox.LSN, what string, f findings) {
	if f.count == 0 || o.said[what] {
		return
	}
	o.said[what] = true
	o.t.Errorf("%s, with %s confirmed, %d %s: %v", when, confirmed, f.count, what, f.first)
}

// findings are counted, and the first few kept.
type findings struct {
	count int
	first []string
}

func (f *findings) add(format string, args ...any) {
	f.count++
	if len(f.first) < 5 {
		f.first = append(f.first, fmt.Sprintf(format, args...))
	}
}

// finish looks a last time, when all is settled.
func (o *observer) finish() {
	o.t.Helper()
	o.must(o.look(o.t.Context(), "at the end"))
	o.t.Logf("observer: %d looks, %d of them with rows on their way", o.looks, o.tight)
	if len(o.wal.unseen) > 0 {
		o.t.Errorf("%d rows of the WAL are not in the stream", len(o.wal.unseen))
	}
	var rows int
	o.query(`SELECT count(*) FROM outbox_messages`, &rows)
	if rows != len(o.wal.rows) {
		o.t.Errorf("the table holds %d rows, the WAL had %d", rows, len(o.wal.rows))
	}
}
