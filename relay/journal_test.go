package relay_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// marksInJournal: every test has its marks in the journal. Those fail that change the table, start `walpost run`, or are
// about the archive or locked rows.
var marksInJournal = os.Getenv("WALPOST_TEST_MARK") == string(outbox.MarkJournal)

// TestMarksInJournal: what every mark is to do, of a table whose rows are never changed.
func TestMarksInJournal(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				t.Run("load", func(t *testing.T) {
					r := newRig(t, pg)
					r.journal()
					r.cfg.Mode, r.cfg.FallbackInterval = mode, time.Second // the progress is a pass behind
					l := newLedger(r)
					stop := l.start(load{writers: 4, rows: 20, pause: 20 * time.Millisecond})
					for range testenv.Size(t, 1, 3) {
						x := r.startAtWork()
						l.reaches(l.committed() + 600)
						r.must(r.nats.Kill())
						r.must(r.nats.Start(t.Context()))
						l.reaches(l.committed() + 600)
						r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'walpost%'`)
						l.reaches(l.committed() + 600)
						x.halt()
					}
					stop()
					x := r.startAtWork()
					l.delivered()
					eventually(t, "the progress has come to the last row", func() bool {
						return r.count(`SELECT count(*) FROM outbox_known WHERE `+testenv.Settled+` = (SELECT max(id) FROM outbox_messages)`) == 1
					})
					x.quietBut()
				})
				t.Run("open transactions", func(t *testing.T) {
					r := newRig(t, pg)
					r.journal()
					r.cfg.Mode, r.cfg.FallbackInterval = mode, time.Second
					x := r.startAtWork()
					l := newLedger(r)
					r.exec(`INSERT INTO ledger SELECT g FROM generate_series(101, 120) g`) // of no other writer
					var open []pgx.Tx
					for account := 101; account <= 120; account++ {
						tx, err := r.conn().Begin(t.Context())
						r.must(err)
						for _, sql := range []string{`SAVEPOINT s`, moveSQL, `ROLLBACK TO s`, moveSQL} {
							args := []any{account, 3, 0}
							if sql != moveSQL {
								args = nil
							}
							_, err = tx.Exec(t.Context(), sql, args...)
							r.must(err)
						}
						open = append(open, tx)
					}
					stop := l.start(load{writers: 2, rows: 5, pause: 10 * time.Millisecond})
					l.reaches(500)
					from := r.query1(`SELECT coalesce(max(` + testenv.Settled + `), 0) FROM outbox_known`)
					// A rollback to a savepoint gives up the locks since, so a hole that it has left may go before the transaction ends.
					eventually(t, "the progress moves on beside them", func() bool {
						return r.count(`SELECT count(*) FROM outbox_known WHERE `+testenv.Settled+` > $1::bigint + 100
							AND `+testenv.Holes+` @> (SELECT range_agg(int8range(id, id + 3)) FROM generate_series(4, 118, 6) id)`, from) == 1
					})
					x.halt()
					x = r.startAtWork()
					l.reaches(l.committed() + 500)
					for i, tx := range open {
						if i%2 == 0 {
							r.must(tx.Commit(t.Context()))
						} else {
							r.must(tx.Rollback(t.Context()))
						}
					}
					stop()
					eventually(t, "all is done, and no hole is left", func() bool {
						return r.count(`SELECT count(*) FROM outbox_known WHERE `+testenv.Settled+` = (SELECT max(id) FROM outbox_messages) AND isempty(`+testenv.Holes+`)`) == 1
					})
					l.delivered()
					x.quietBut()
				})
				t.Run("loss", func(t *testing.T) {
					r := newRig(t, pg)
					r.journal()
					r.cfg.Mode = mode
					lost := testenv.Size(t, 3000, moreThanAStep)
					x, restore := rolledBack(t, r, lost)
					x.halt()
					restore()
					x = r.startAtWork()
					r.put(copied+lost+1, copied+lost+10)
					r.storedAgain(lost, copied+lost+10)
					r.saysLost(x, copied+1, copied+lost)
				})
				t.Run("replay", func(t *testing.T) {
					r := newRig(t, pg)
					r.journal()
					r.cfg.Mode = mode
					x := r.startAtWork()
					r.put(1, 20)
					r.pending(0)
					r.wantReplayed(r.request(table.ReplayChoice{}), "done 20 0")
					r.wantReplayed(r.request(table.ReplayChoice{IDs: []string{"3", "17", "99"}}), "done 2 0")
					since := time.Now().Add(-time.Hour)
					r.wantReplayed(r.request(table.ReplayChoice{Since: &since, Until: &since}), "done 0 0")
					if n := r.storedCount(); n != 42 {
						t.Errorf("%d messages are stored, want 42", n)
					}
					x.quietBut()
				})
				t.Run("failures", func(t *testing.T) {
					r := newRig(t, pg)
					r.journal()
					r.cfg.Mode, r.cfg.Retry.Backoff, r.cfg.Retry.MaxAttempts = mode, time.Hour, 1
					r.cfg.FallbackInterval = time.Second
					r.withoutPayments()
					x := r.startAtWork()
					r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
						SELECT 'order', g / 2, CASE WHEN g % 2 = 0 THEN 'payment.taken' ELSE 'order.placed' END, '{"n": 1}' FROM generate_series(2, 9) g ORDER BY g`)
					eventually(t, "four rows are parked, and four held", func() bool {
						return r.query1(`SELECT concat(count(*) FILTER (WHERE attempts = 1), ' ', count(*) FILTER (WHERE last_error LIKE 'held%')) FROM outbox_deferred`) == "4 4"
					})
					r.exec(`UPDATE outbox_deferred SET available_at = now() WHERE id IN (1, 3)`)
					eventually(t, "two are dead letters, and what they held is delivered", func() bool {
						return r.query1(`SELECT concat(count(*), ' ', (SELECT count(*) FROM outbox_messages_dlq)) FROM outbox_deferred`) == "4 2"
					})
					r.takePayments()
					r.exec(`UPDATE outbox_deferred SET available_at = now() WHERE attempts > 0`)
					eventually(t, "nothing is pending", func() bool { return r.unmarked() == 0 })
					if n := r.storedCount(); n != 6 {
						t.Errorf("%d messages are stored, want 6", n)
					}
					x.quiet("row_unsettled", "missed_rows")
				})
			})
		})
	}
}

// markWith has the table's marks where they are to be.
func (r *rig) markWith(mark outbox.Mark) {
	r.t.Helper()
	if mark == outbox.MarkJournal {
		r.journal()
	} else {
		r.cfg.Outboxes[0].Mark = mark
	}
}

// journal has the table's marks in the journal. To the tests it looks as if they were in the row: they see a view of that
// name. What they write to it goes to the table, or to the deferrals.
func (r *rig) journal() {
	r.t.Helper()
	o := r.cfg.Outboxes[0]
	o.Mark, o.Layout = outbox.MarkJournal, o.Layout.Journaled()
	columns := `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id`
	insert := `coalesce(NEW.id, nextval(pg_get_serial_sequence('public.outbox_messages', 'id'))), coalesce(NEW.tenant_id, 0), NEW.aggregate_type, NEW.aggregate_id,
		NEW.event_type, coalesce(NEW.event_version, 1), NEW.payload, coalesce(NEW.occurred_at, now()), coalesce(NEW.available_at, now()), NEW.trace_id`
	r.exec(strings.Join(table.AppendOnlySQL(o, "public."+table.AppendOnly), ";"))
	r.exec(strings.NewReplacer("{columns}", columns, "{insert}", insert).Replace(`
		CREATE SCHEMA seen;
		CREATE VIEW seen.outbox_messages AS SELECT e.id, e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, e.payload,
			e.occurred_at, coalesce(d.available_at, e.available_at) AS available_at,
			(SELECT max(j.processed_at) FROM public.outbox_journal j WHERE j.ids @> e.id) AS processed_at,
			coalesce(d.attempts, 0::smallint) AS attempts, d.last_error, e.trace_id
		FROM public.outbox_messages e LEFT JOIN public.outbox_deferred d ON d.outbox = 'public.outbox_messages' AND d.id = e.id
		WHERE NOT EXISTS (SELECT FROM public.outbox_journal j WHERE j.kind = 'dead' AND j.ids @> e.id);
		CREATE FUNCTION seen.write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF TG_OP = 'INSERT' THEN
				INSERT INTO public.outbox_messages ({columns}) OVERRIDING SYSTEM VALUE VALUES ({insert}) RETURNING id INTO NEW.id;
			ELSIF TG_OP = 'DELETE' THEN
				DELETE FROM public.outbox_messages WHERE id = OLD.id;
				RETURN OLD;
			ELSE
				INSERT INTO public.outbox_deferred (outbox, id, attempts, last_error, available_at)
				VALUES ('public.outbox_messages', NEW.id, NEW.attempts, NEW.last_error, NEW.available_at)
				ON CONFLICT (outbox, id) DO UPDATE SET attempts = NEW.attempts, last_error = NEW.last_error, available_at = NEW.available_at;
			END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER write INSTEAD OF INSERT OR UPDATE OR DELETE ON seen.outbox_messages FOR EACH ROW EXECUTE FUNCTION seen.write()`))
	r.exec(`ALTER DATABASE ` + r.query1(`SELECT current_database()::text`) + ` SET search_path = seen, public`)
	r.disconnect() // a kept connection has the old path
}
