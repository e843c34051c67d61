package relay_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// SIGTERM under load, in the middle of a backlog: the relay takes nothing more,
// waits for what is on its way, marks and confirms it, and ends with exit code 0.
// What is stored is then marked, what is marked is confirmed, and the next start
// sends nothing again.
func TestTerminateUnderLoad(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		r.launch().awaitState("streaming").terminate() // makes the slot: what is committed before is not in its WAL
		const left = 10_000                            // rows that are still to be sent then
		for shown, backlog := 0, 2*left; shown < 4; {
			stop := l.start(load{writers: 4, rows: 100, pause: 10 * time.Millisecond})
			eventually(t, "a backlog comes together", func() bool { return r.unmarked() >= backlog })
			before := r.storedCount()
			p := r.launch()
			eventually(t, "events are stored", func() bool { return r.storedCount() > before+1000 })
			begun := time.Now()
			p.terminate()
			took, n := time.Since(begun).Round(time.Millisecond), r.unmarked()
			stop()
			t.Logf("ended %s after SIGTERM, with %d rows left", took, n)
			r.nothingInDoubt()
			if n >= left {
				shown++
			} else {
				backlog *= 2 // the relay was faster than the signal
			}
		}
		p := r.launch()
		l.delivered()
		p.terminate()
		p = r.launch().awaitState("streaming")
		r.passes(r.here()) // so it has been through the whole WAL
		l.compare()
		p.terminate()
	})
}

// nothingInDoubt looks at a database whose relay has ended well: the stream
// holds just the marked rows, and the slot brings none of them again, unless the
// relay ended between two rows of their transaction.
func (r *rig) nothingInDoubt() {
	r.t.Helper()
	var marked uint64
	c := r.conn()
	r.must(c.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`).Scan(&marked))
	if stored := r.storedCount(); stored != marked {
		r.t.Errorf("%d messages are stored, %d rows are marked", stored, marked)
	}
	eventually(r.t, "the walsender has gone", func() bool { return r.walsenders() == "0" })
	rows, err := c.Query(r.t.Context(), `SELECT data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', 'walpost')`, r.cfg.Slot)
	r.must(err)
	changes, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	r.must(err)
	var first outbox.LSN // the commit of the first transaction with events
	var ids []string
	d := decode.New(r.cfg.Outboxes)
	for _, data := range changes {
		m, err := d.Decode(data)
		r.must(err)
		if m.Kind != decode.Row {
			continue
		}
		if first == 0 {
			first = m.Event.Commit
		}
		if m.Event.Commit != first {
			ids = append(ids, string(m.Event.Values[outbox.ID]))
		}
	}
	var again int
	r.must(c.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE id = ANY($1::text[]::bigint[]) AND processed_at IS NOT NULL`, ids).Scan(&again))
	r.t.Logf("%d rows are stored and marked; the slot has %d more", marked, len(ids))
	if again > 0 {
		r.t.Errorf("%d rows are marked and not confirmed", again)
	}
}
