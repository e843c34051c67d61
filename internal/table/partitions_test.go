package table

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestMarksReadTheirPartitions: a mark looks for each row in the partition of its key only.
func TestMarksReadTheirPartitions(t *testing.T) {
	now := partition.MonthOf(time.Now())
	testenv.Clusters(t, func(t *testing.T, pgs *testenv.Postgres) {
		for name, c := range map[string]struct {
			by   string             // PARTITION BY
			key  outbox.Field       // that the table is partitioned by
			part func(n int) string // FOR VALUES of the n-th partition, or less
			at   func(n int) (tenant string, occurred time.Time)
		}{
			"months": {
				by: "RANGE (occurred_at)", key: outbox.OccurredAt,
				part: func(n int) string {
					return "FROM (" + partition.MonthBound(now.AddDate(0, -n, 0)) + ") TO (" + partition.MonthBound(now.AddDate(0, 1-n, 0)) + ")"
				},
				at: func(n int) (string, time.Time) { return "1", now.AddDate(0, -n, 0).Add(time.Microsecond) },
			},
			"tenants": {
				by: "LIST (tenant_id)", key: outbox.TenantID,
				part: func(n int) string { return fmt.Sprintf("IN (%d)", 1000+n) },
				at:   func(n int) (string, time.Time) { return strconv.Itoa(1000 + n), now },
			},
			"hash of tenants": {
				by: "HASH (tenant_id)", key: outbox.TenantID,
				part: func(n int) string { return fmt.Sprintf("WITH (MODULUS 25, REMAINDER %d)", n) },
				at:   func(n int) (string, time.Time) { return strconv.Itoa(n), now },
			},
		} {
			t.Run(name, func(t *testing.T) { marksReadPartitions(t, pgs, c.by, c.key, c.part, c.at) })
		}
	})
}

func marksReadPartitions(
	t *testing.T, pgs *testenv.Postgres, by string, key outbox.Field, part func(int) string,
	at func(int) (string, time.Time),
) {
	const parts = 25
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	url := pgs.NewDB(t)
	cfg, err := pgx.ParseConfig(url)
	must(t, err)
	m := migrations.New(cfg, []*outbox.Table{table})
	defer m.Close()
	_, err = m.Up(t.Context(), migrations.Latest)
	must(t, err)
	db, err := Open(t.Context(), Config{URL: url, Slot: "walpost"})
	must(t, err)
	defer db.Close()
	run := func(sql string, args ...any) {
		t.Helper()
		_, err := db.Conn().Exec(t.Context(), sql, args...)
		must(t, err)
	}
	run(`ALTER TABLE public.outbox_messages RENAME TO plain`)
	run(`CREATE TABLE public.outbox_messages (LIKE public.plain INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY ` + by)
	run(`CREATE INDEX ON public.outbox_messages (id)`)
	for n := range parts {
		run(fmt.Sprintf(`CREATE TABLE public.part_%02d PARTITION OF public.outbox_messages FOR VALUES %s`, n, part(n)))
	}
	must(t, db.CheckTable(t.Context(), table))
	if table.PartitionKey != key || table.KeyType == "" || !table.Partitioned {
		t.Fatalf("partition key %d of type %q, partitioned %t", table.PartitionKey, table.KeyType, table.Partitioned)
	}
	insert := func(n, rows int, processed *time.Time) (inserted []Row) {
		tenant, occurred := at(n)
		result, _ := db.Conn().Query(t.Context(), `INSERT INTO public.outbox_messages AS t
				(tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
			SELECT $1::text::bigint, 'order', g, 'order.placed', '{}', $2, $4 FROM generate_series(1, $3) g
			RETURNING t.id::text, `+table.HashSQL("t")+`, t.`+table.Column(key)+`::text`, tenant, occurred, rows, processed)
		var id, key string
		var hash int64
		_, err := pgx.ForEachRow(result, []any{&id, &hash, &key}, func() error {
			inserted = append(inserted, Row{Ref: outbox.Ref{Table: table, ID: id, Hash: uint64(hash)}, Key: key})
			return nil
		})
		must(t, err)
		return inserted
	}
	processed := time.Now()
	for n := range parts {
		insert(n, 2000, &processed)
	}
	run(`ANALYZE public.outbox_messages`)
	scan := regexp.MustCompile(`(?:Scan|Update|Delete).* on (part_\d\d)\S*(?: \S+)? \(.*loops=([1-9]\d*)`)
	for name, mark := range map[string]Mark{"update": dated, "delete": deleted{}} {
		of := *table
		of.Mark = outbox.Mark(name)
		command := updateSQL
		if name == "delete" {
			command = deleteSQL
		}
		for _, plans := range []string{"force_custom_plan", "force_generic_plan"} {
			var rows []Row
			for _, n := range []int{3, 4, 17} {
				rows = append(rows, insert(n, 100, nil)...)
			}
			run(`SET plan_cache_mode = ` + plans)
			result, err := db.Conn().Query(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF) "+markSQL(&of, command(&of)), db.args(rows).keyed()...)
			must(t, err)
			lines, err := pgx.CollectRows(result, pgx.RowTo[string])
			must(t, err)
			run(`RESET plan_cache_mode`)
			read, loops := map[string]bool{}, 0
			for _, line := range lines {
				if m := scan.FindStringSubmatch(line); m != nil {
					n, err := strconv.Atoi(m[2])
					must(t, err)
					read[m[1]], loops = true, loops+n
				}
			}
			// One look to lock a row, one to change it, and one for each partition that is changed.
			if most := 2*len(rows) + parts; len(read) > 3 || loops > most {
				t.Errorf("%s, %s: %d partitions are read, in %d scans, want at most 3 and %d:\n%s", name, plans, len(read), loops, most, strings.Join(lines, "\n"))
			}
		}

		// Keys that are not known, rows that are gone, and one that has another key by now.
		rows := append(insert(5, 500, nil), insert(9, 500, nil)...)
		elsewhere, later := at(11)
		run(`UPDATE public.outbox_messages SET tenant_id = $2::text::bigint, occurred_at = $3 WHERE id = $1::text::bigint`, rows[20].Ref.ID, elsewhere, later)
		run(`DELETE FROM public.outbox_messages WHERE id = $1::text::bigint`, rows[30].Ref.ID)
		unknown := append([]Row(nil), rows[500:]...)
		unknown[7].Key = ""
		for _, some := range [][]Row{rows[:500], unknown} {
			verdicts, err := mark.mark(t.Context(), db, &of, some)
			must(t, err)
			for i, v := range verdicts {
				if v != Done {
					t.Errorf("%s: row %d: %v", name, i, v)
				}
			}
		}
		var left string
		must(t, db.Conn().QueryRow(t.Context(), `SELECT count(*)::text FROM public.outbox_messages WHERE processed_at IS NULL`).Scan(&left))
		if left != "1" {
			t.Errorf("%s: %s rows are pending, want the one with another key", name, left)
		}
		run(`DELETE FROM public.outbox_messages WHERE processed_at IS NULL`)
	}

	var took [2]time.Duration
	for i := range 20 {
		rows := make([]Row, 0, 500)
		for n := range 5 {
			rows = append(rows, insert(n+i%5, 100, nil)...)
		}
		if i%2 == 1 {
			for j := range rows {
				rows[j].Key = ""
			}
		}
		begun := time.Now()
		_, err := dated.mark(t.Context(), db, table, rows)
		must(t, err)
		took[i%2] += time.Since(begun)
	}
	t.Logf("marks of 500 rows in 5 of %d partitions take %.2f of the time that they take without their keys", parts, took[0].Seconds()/took[1].Seconds())
}
