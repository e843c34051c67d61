package table_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestGiveUpInFlight: a row that a relay has in flight when it is given up is settled by the relay alone. If it is marked
// meanwhile, it stays marked; if an attempt from before fails, that is not recorded, and the next attempt is the last one.
func TestGiveUpInFlight(t *testing.T) {
	const recorded = `SELECT concat_ws(' ', attempts, available_at <= now(), last_error) FROM `
	for mark, c := range map[outbox.Mark]struct{ settle, records string }{
		outbox.MarkUpdate: {`UPDATE outbox_messages SET processed_at = now(), last_error = NULL WHERE id = 1`, "outbox_messages WHERE id = 2"},
		outbox.MarkDelete: {`DELETE FROM outbox_messages WHERE id = 1`, "outbox_messages WHERE id = 2"},
		outbox.MarkJournal: {
			`WITH put AS (INSERT INTO outbox_journal (outbox, kind, ids) VALUES ('public.outbox_messages', 'stored', '{[1,2)}')) DELETE FROM outbox_deferred WHERE id = 1`,
			"outbox_deferred WHERE id = 2",
		},
	} {
		t.Run(string(mark), func(t *testing.T) {
			b := newBench(t, testenv.SharedPostgres(t), mark)
			rows := b.insert(2)
			for i := range rows {
				rows[i].Failure = "subject: bad"
			}
			retry := table.Retry{Backoff: time.Hour, MaxAttempts: 10}
			v, err := b.db.Park(t.Context(), b.table, rows, retry)
			b.must(err)
			b.want(v, table.Done, table.Done)
			b.must(b.db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SET lock_timeout = 0`)
				return err
			}))

			tx, err := b.app.Begin(t.Context())
			b.must(err)
			_, err = tx.Exec(t.Context(), c.settle)
			b.must(err)
			gaveUp := make(chan error, 1)
			go func() { gaveUp <- b.db.GiveUp(t.Context(), b.table, "1", 10) }()
			for waits := false; !waits; time.Sleep(10 * time.Millisecond) {
				b.must(tx.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)`).Scan(&waits))
			}
			b.must(tx.Commit(t.Context()))
			if err := <-gaveUp; err == nil {
				t.Error("a row that was delivered meanwhile is given up")
			}
			if n, err := b.db.PendingCount(t.Context(), b.table, 10); n != 1 || err != nil {
				t.Errorf("%d rows are pending, want the other one: %v", n, err)
			}

			failed := rows[1:]
			failed[0].Polled, failed[0].Attempts = true, 1
			b.must(b.db.GiveUp(t.Context(), b.table, "2", 10))
			b.is("given up", b.text(recorded+c.records), "10 t subject: bad")
			v, err = b.db.Park(t.Context(), b.table, failed, retry)
			b.must(err)
			b.want(v, table.Done)
			b.is("after a failure from before", b.text(recorded+c.records), "10 t subject: bad")
			failed[0].Attempts = 10
			v, err = b.db.Park(t.Context(), b.table, failed, retry)
			b.must(err)
			b.want(v, table.Done)
			b.is("dead letter", b.text(`SELECT concat_ws(' ', row_id, attempts, last_error) FROM outbox_messages_dlq`), "2 11 subject: bad")
		})
	}
}

// TestGiveUpBesideAFailure: a row is given up after the statement that records a failure of it has its snapshot, and before that locks
// the deferral. A policy of the outbox, which applies to other roles than its owner, holds the statement while it reads the row.
func TestGiveUpBesideAFailure(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	rows := b.insert(1)
	rows[0].Failure = "subject: bad"
	retry := table.Retry{Backoff: time.Hour, MaxAttempts: 10}
	_, err := b.db.Park(t.Context(), b.table, rows, retry)
	b.must(err)
	rows[0].Polled, rows[0].Attempts = true, 1

	role := "recorder_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO ` + role + `;
		CREATE FUNCTION held() RETURNS boolean VOLATILE LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN true; END $$;
		ALTER TABLE outbox_messages ENABLE ROW LEVEL SECURITY; CREATE POLICY held ON outbox_messages USING (held())`)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	recorder := b.open()
	b.must(recorder.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET row_security = on; SET ROLE `+role)
		return err
	}))
	b.exec(`SELECT pg_advisory_lock(77)`)
	recorded := make(chan error, 1)
	go func() {
		_, err := recorder.Park(t.Context(), b.table, rows, retry)
		recorded <- err
	}()
	b.waits("1", func() bool { return len(recorded) > 0 })
	if len(recorded) > 0 {
		t.Fatalf("the failure is not held: %v", <-recorded)
	}
	b.must(b.db.GiveUp(t.Context(), b.table, "1", 10))
	b.exec(`SELECT pg_advisory_unlock(77)`)
	b.must(<-recorded)
	b.is("the row that was given up", b.text(`SELECT concat_ws(' ', attempts, available_at <= now(), last_error) FROM outbox_deferred`), "10 t subject: bad")
}
