package table

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestShardSearchesPassOverOthers: with the indexes for shards, no search reads the rows that
// wait for another shard's relay.
func TestShardSearchesPassOverOthers(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		cfg, err := pgx.ParseConfig(url)
		must(t, err)
		m := migrations.New(cfg, []*outbox.Table{table})
		defer m.Close()
		_, err = m.Up(t.Context(), migrations.Latest)
		must(t, err)
		table.Shard = outbox.Shard{Index: 2, Of: 2}
		db, err := Open(t.Context(), Config{URL: url, Slot: "walpost"})
		must(t, err)
		defer db.Close()
		must(t, db.CheckTable(t.Context(), table))
		exec := func(sql string) {
			t.Helper()
			_, err := db.Conn().Exec(t.Context(), sql)
			must(t, err)
		}
		findings, err := db.IndexFindings(t.Context(), table)
		must(t, err)
		if len(findings) != 2 || findings[0].Code != "table-index" {
			t.Errorf("without the indexes doctor finds %v", findings)
		}
		for _, sql := range table.ShardIndexes() {
			exec(sql)
		}
		if findings, err = db.IndexFindings(t.Context(), table); err != nil || len(findings) != 0 {
			t.Errorf("with the indexes doctor finds %v: %v", findings, err)
		}

		// Aggregates of both shards; 50 rows of this one lie among those of the other.
		insert := fmt.Sprintf(`INSERT INTO public.outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
			SELECT 'order', CASE WHEN n %% 1000 = 500 THEN own.id ELSE other.id END, 'order.placed', '{}', now() + CASE WHEN n %% 1000 = 500 AND n %% 2000 = 500 THEN interval '1 hour' ELSE interval '0' END
			FROM generate_series(1, 100000) n, (%s) own, (%s) other`,
			"SELECT aggregate_id AS id FROM (SELECT x::bigint AS aggregate_id, 0::bigint AS id FROM generate_series(1, 100) x) t WHERE "+table.ShardSQL("t")+" LIMIT 1",
			"SELECT aggregate_id AS id FROM (SELECT x::bigint AS aggregate_id, 0::bigint AS id FROM generate_series(1, 100) x) t WHERE NOT ("+table.ShardSQL("t")+") LIMIT 1")
		for _, sql := range []string{insert, `UPDATE public.outbox_messages SET processed_at = now()`, insert, `VACUUM ANALYZE public.outbox_messages`, insert} {
			exec(sql) // statistics of a queue are behind: autovacuum makes them after 100,000 changes
		}

		searches := map[string]func() (int, error){
			"due": func() (int, error) {
				cs, err := db.Fresh(t.Context(), table, time.Second, 1000)
				return len(cs), err
			},
			"due, more than the limit": func() (int, error) {
				cs, err := db.Fresh(t.Context(), table, time.Second, 5)
				return len(cs), err
			},
			"next due": func() (int, error) {
				wait, _, err := db.NextDue(t.Context(), table)
				return int(wait.Round(time.Hour).Hours()), err
			},
			"oldest pending": func() (int, error) {
				_, err := db.OldestPending(t.Context(), table)
				return 0, err
			},
			"before the slot": func() (int, error) {
				left, err := (&Backlog{Table: table, Threshold: time.Second}).Left(t.Context(), db)
				return min(len(left), 1), err
			},
			"pending": func() (int, error) { return db.PendingCount(t.Context(), table, 10) },
			"recorded": func() (int, error) {
				cs, err := db.Recorded(t.Context(), table, true, 1000)
				return len(cs), err
			},
			"overtaken": func() (int, error) {
				keys, err := db.Overtaken(t.Context(), table, time.Second, nil)
				return len(keys), err
			},
		}
		found := map[string]int{"due": 100, "due, more than the limit": 5, "next due": 1, "before the slot": 1, "pending": 10}
		for name, search := range searches {
			before := entriesRead(t, db)
			n, err := search()
			must(t, err)
			if read := entriesRead(t, db) - before; read > 1000 {
				t.Errorf("%s: it reads %d index entries", name, read)
			}
			if n != found[name] {
				t.Errorf("%s: found %d, want %d", name, n, found[name])
			}
		}
	})
}

// entriesRead is how many entries of the table's indexes were read so far.
func entriesRead(t *testing.T, db *DB) (n int64) {
	t.Helper()
	_, err := db.Conn().Exec(t.Context(), `SELECT pg_stat_force_next_flush()`)
	must(t, err)
	_, err = db.Conn().Exec(t.Context(), `SELECT pg_stat_clear_snapshot()`)
	must(t, err)
	must(t, db.Conn().QueryRow(t.Context(), `SELECT (sum(idx_tup_read) + (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'outbox_messages'))::bigint
		FROM pg_stat_user_indexes WHERE relname = 'outbox_messages'`).Scan(&n))
	return n
}
