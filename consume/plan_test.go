package consume

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

// TestPurgeReadsOldIDsOnly: as a rule no id is old enough, however many there are, and however old the statistics.
func TestPurgeReadsOldIDsOnly(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	cfg, err := pgx.ParseConfig(url)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	m := migrations.New(cfg, nil, migrations.Consumer)
	_, err = m.Up(t.Context(), migrations.Latest)
	must(err)
	must(m.Close())
	conn, err := pgx.Connect(t.Context(), url)
	must(err)
	defer conn.Close(t.Context())
	run := func(sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		must(err)
	}
	run(`ALTER TABLE consumer_seen SET (autovacuum_enabled = off);
		INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, anchor_stored_at) VALUES ('c', 0, 1, now());
		INSERT INTO consumer_seen SELECT gen_random_uuid(), chr(97 + g % 3), now() - random() * interval '1 hour' FROM generate_series(1, 200000) g`)
	c := &consumer{Config: Config{Schema: "public"}}
	run(`BEGIN`)
	run(byIndexSQL)
	for _, statistics := range []string{"none", "of this moment"} {
		rows, _ := conn.Query(t.Context(), "EXPLAIN "+c.sql(purgeSQL), "c", "7 days", 2000)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(err)
		if plan := strings.Join(lines, "\n"); strings.Contains(plan, "Seq Scan on consumer_seen") {
			t.Errorf("with statistics %s:\n%s", statistics, plan)
		}
		run(`ANALYZE`)
	}
}
