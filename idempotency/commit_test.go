package idempotency_test

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
)

// failAtCommit refuses each transaction with an effect when it commits.
const failAtCommit = `
	CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN RAISE EXCEPTION 'refused at commit' USING ERRCODE = 'check_violation'; END $$;
	CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION refuse()`

// holdCommits makes each transaction with an effect wait in its COMMIT until resume is called. A connection that
// breaks has pgx cancel its statement: the wait outlives that.
func (b *bench) holdCommits() (resume func()) {
	b.t.Helper()
	b.exec(`CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			LOOP
				BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL;
				EXCEPTION WHEN query_canceled THEN NULL;
				END;
			END LOOP;
		END $$;
		CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION hold()`)
	conn, err := pgx.Connect(b.t.Context(), b.url)
	must(b.t, err)
	_, err = conn.Exec(b.t.Context(), `SELECT pg_advisory_lock(42)`)
	must(b.t, err)
	var once sync.Once
	resume = func() { once.Do(func() { _ = conn.Close(context.Background()) }) }
	b.t.Cleanup(resume)
	return resume
}

func (b *bench) waitForHeldCommit() {
	b.t.Helper()
	b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'`, "1")
}

// killCommit ends the process of the transaction that waits in its COMMIT.
func (b *bench) killCommit() {
	b.t.Helper()
	b.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'`)
}
