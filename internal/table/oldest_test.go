package table_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// The lag counts from the time when a row was due, whether that stands in available_at or the row was due at once; it is
// there with each mark that leaves rows in the table.
func TestOldestPending(t *testing.T) {
	own := func(columns map[string]string) outbox.Layout {
		layout, err := outbox.CustomLayout(columns)
		if err != nil {
			t.Fatal(err)
		}
		return layout
	}
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for name, c := range map[string]struct {
			table outbox.Table
			// insert takes the ages of a row: since it was made and, NULL where it was due at once, since it was due.
			insert string
			// Of the ages that the rows below have, these count.
			ofDue, ofMade bool
		}{
			"canonical": {
				outbox.Table{Name: outbox.DefaultTable, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
				`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at)
					VALUES ('order', 1, 'order.placed', '{}', now() - $1::interval, now() - coalesce($2::interval, $1))`, true, true,
			},
			"append": {
				outbox.Table{Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal},
				`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at)
					VALUES ('order', 1, 'order.placed', '{}', now() - $1::interval, now() - $2::interval)`, true, true,
			},
			"nullable": {
				outbox.Table{Name: "box", Mark: outbox.MarkDelete, Layout: own(map[string]string{
					"id": "id", "event_type": "kind", "payload": "body", "occurred_at": "made", "available_at": "due",
				})},
				`INSERT INTO box (made, due) VALUES (now() - $1::interval, now() - $2::interval)`, true, true,
			},
			"no due time": {
				outbox.Table{Name: "box", Mark: outbox.MarkDelete, Layout: own(map[string]string{
					"id": "id", "event_type": "kind", "payload": "body", "occurred_at": "made",
				})},
				`INSERT INTO box (made, due) VALUES (now() - $1::interval, now() - $2::interval)`, false, true,
			},
			"due time only": {
				outbox.Table{Name: "box", Mark: outbox.MarkDelete, Layout: own(map[string]string{
					"id": "id", "event_type": "kind", "payload": "body", "available_at": "due",
				})},
				`INSERT INTO box (made, due) VALUES (now() - $1::interval, now() - $2::interval)`, true, false,
			},
			"no time": {
				outbox.Table{Name: "box", Mark: outbox.MarkDelete, Layout: own(map[string]string{
					"id": "id", "event_type": "kind", "payload": "body",
				})},
				`INSERT INTO box (made, due) VALUES (now() - $1::interval, now() - $2::interval)`, false, false,
			},
		} {
			t.Run(name, func(t *testing.T) {
				b := &bench{t: t, url: pg.NewDB(t), table: &c.table}
				b.table.Schema = "public"
				b.app = b.connect()
				if b.table.Name == "box" {
					b.exec(`CREATE TABLE box (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
						kind text NOT NULL DEFAULT 'order.placed', body jsonb, made timestamptz, due timestamptz)`)
				}
				cfg, err := pgx.ParseConfig(b.url)
				b.must(err)
				m := migrations.New(cfg, []*outbox.Table{b.table})
				defer m.Close()
				_, err = m.Up(t.Context(), migrations.Latest)
				b.must(err)
				b.db = b.open()
				b.must(b.db.CheckTable(t.Context(), b.table))

				lag := func(what string, want time.Duration) {
					t.Helper()
					got, err := b.db.OldestPending(t.Context(), b.table)
					b.must(err)
					if got = got.Truncate(10 * time.Minute); got != want {
						t.Errorf("%s: the lag is %v, want %v", what, got, want)
					}
				}
				row := func(made string, due any) {
					t.Helper()
					b.exec(c.insert, made, due)
				}
				of := func(counts bool, age time.Duration) time.Duration {
					if !counts {
						return 0
					}
					return age
				}
				lag("nothing waits", 0)
				row("0", "-2 hours")
				lag("a row is due later", 0)
				row("20 minutes", nil)
				lag("a row is due at once", of(c.ofMade, 20*time.Minute))
				row("0", "40 minutes")
				lag("and one since a time", max(of(c.ofDue, 40*time.Minute), of(c.ofMade, 20*time.Minute)))
				row("1 hour", nil)
				oldest := max(of(c.ofDue, 40*time.Minute), of(c.ofMade, time.Hour))
				lag("an older one is due at once", oldest)
				if table.Journals(b.table) {
					b.exec(`INSERT INTO outbox_journal (outbox, kind, ids) VALUES ('public.outbox_events', 'stored', '{[4,5)}')`)
					lag("which is stored", 40*time.Minute)
					b.exec(`INSERT INTO outbox_deferred (outbox, id, last_error, available_at)
						VALUES ('public.outbox_events', 3, 'refused', now() + interval '1 hour')`)
					lag("the next is parked", 20*time.Minute)
				}
			})
		}
	})
}
