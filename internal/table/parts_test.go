package table

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestPartsCoverEveryHash: a search whose parts are too large at first comes to each hash once, and the next search
// begins with the parts that this one came to.
func TestPartsCoverEveryHash(t *testing.T) {
	var p parts
	tooLong := fmt.Errorf("look: %w", &pgconn.PgError{Code: "57014"})
	for round, want := range []int{11, 8} { // one, two and four parts are too few
		searches, next := 0, int64(math.MinInt64)
		must(t, p.run("hash", func(where string) (bool, error) {
			searches++
			from, to := int64(math.MinInt64), int64(math.MaxInt64)
			if where != "" {
				_, err := fmt.Sscanf(where, " AND hash BETWEEN '%d'::bigint AND '%d'::bigint", &from, &to)
				must(t, err)
			}
			if uint64(to-from) > 1<<61 { // more than an eighth
				return false, []error{tooLong, errTooMany}[searches%2]
			}
			if from != next {
				t.Errorf("a part begins at %d, want %d", from, next)
			}
			next = to + 1 // and at last the least again
			return false, nil
		}))
		if next != math.MinInt64 || searches != want {
			t.Errorf("round %d: %d searches, and the next hash is %d", round, searches, next)
		}
		p.n.Store(8) // a quick round halves it
	}
	if err := p.run("", func(where string) (bool, error) { return false, tooLong }); !TooLong(err) {
		t.Errorf("a search that cannot be divided: %v", err)
	}
	other := errors.New("another error")
	if err := p.run("hash", func(string) (bool, error) { return false, other }); err != other {
		t.Errorf("got %v", err)
	}
}

// TestSearchesHaveParts: the poller's searches get through many recorded rows, although together they take longer
// than a statement may, and find in parts what they find at once. The first row of some aggregates is not due.
func TestSearchesHaveParts(t *testing.T) {
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	url := testenv.SharedPostgres(t).CopyDB(t, "searches", func(url string) { migrateTable(t, url, table) })
	app, err := pgx.Connect(t.Context(), url)
	must(t, err)
	defer app.Close(t.Context())
	_, err = app.Exec(t.Context(), `
		INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, attempts, last_error) SELECT 'order', g % 8000, 'x', '{}', 1, 'size: ' FROM generate_series(1, 16000) g;
		UPDATE outbox_messages SET available_at = now() + interval '1 hour' WHERE id % 7 = 0;
		ANALYZE outbox_messages`)
	must(t, err)
	ids := func(cs []Candidate) (ids []string) {
		for _, c := range cs {
			ids = append(ids, c.ID)
		}
		slices.Sort(ids)
		return ids
	}
	for name, search := range map[string]struct {
		parts func(*DB) *parts
		run   func(*DB) (any, error)
	}{
		"recorded": {func(db *DB) *parts { return db.recordedParts.of(table) }, func(db *DB) (any, error) {
			cs, err := db.Recorded(t.Context(), table, true, 30_000)
			return ids(cs), err
		}},
		"aggregates": {func(db *DB) *parts { return db.keyParts.of(table) }, func(db *DB) (any, error) {
			keys := map[outbox.AggregateKey]int{}
			err := db.Aggregates(t.Context(), table, func(key outbox.AggregateKey) {
				keys[key]++
			})
			return keys, err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, part := range []time.Duration{4, 16, 64} {
				var want any
				db := openLimited(t, url, table, part, func(db *DB) (err error) {
					want, err = search.run(db)
					return err
				})
				got, err := search.run(db)
				must(t, err)
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("found in parts: %.200s\nat once: %.200s", fmt.Sprint(got), fmt.Sprint(want))
				}
				if len(fmt.Sprint(want)) < 1000 {
					t.Errorf("found only %v", want)
				}
				if search.parts(db).n.Load() > 1 {
					return
				}
				// The machine was busy with something else when the limit was found.
			}
			t.Error("there was time for all at once: the test shows nothing")
		})
	}
}

// TestPartsAreCountedPerTable: a quick search of one table leaves the number of another's parts alone, with or
// without a hash.
func TestPartsAreCountedPerTable(t *testing.T) {
	var p tableParts
	large := &outbox.Table{Schema: "public", Name: "large", Layout: outbox.Canonical()}
	p.of(large).n.Store(16)
	for _, hash := range []string{"hash", ""} {
		other := &outbox.Table{Schema: "public", Name: "other", Layout: outbox.Canonical()}
		must(t, p.of(other).run(hash, func(string) (bool, error) { return false, nil }))
	}
	if n := p.of(large).n.Load(); n != 16 {
		t.Errorf("the next search of the large table has %d parts, want 16", n)
	}
}

// migrateTable makes walpost's tables in a database.
func migrateTable(t *testing.T, url string, table *outbox.Table) {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	must(t, err)
	m := migrations.New(cfg, []*outbox.Table{table})
	_, err = m.Up(t.Context(), migrations.Latest)
	must(t, errors.Join(err, m.Close()))
}
