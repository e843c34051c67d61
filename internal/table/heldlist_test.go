package table_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// fillWaiting parks a row of each of 100 aggregates, and holds 999 more rows of each behind it. Delivered and pending
// rows are around them.
func (b *bench) fillWaiting() {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 7, 'order', n % 200, 'order.placed', '{}' FROM generate_series(0, 219999) n`)
	switch {
	case table.Journals(b.table):
		b.exec(`INSERT INTO outbox_deferred (outbox, id, aggregate_hash, attempts, last_error, available_at)
			SELECT 'public.outbox_messages', id, hash_record_extended(ROW(tenant_id, aggregate_type, aggregate_id), 0), CASE WHEN id <= 200 THEN 3 ELSE 0 END,
				CASE WHEN id <= 200 THEN 'subject: a space' ELSE 'held: behind a row' END, '2026-01-01' FROM outbox_messages WHERE aggregate_id < 100 AND id <= 200000`)
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids) SELECT 'public.outbox_messages', 'stored', range_agg(int8range(id, id + 1))
			FROM outbox_messages WHERE aggregate_id >= 100 OR id > 200000 GROUP BY id / 1000`)
	default:
		b.exec(`UPDATE outbox_messages SET attempts = CASE WHEN id <= 200 THEN 3 ELSE 0 END, available_at = '2026-01-01',
			last_error = CASE WHEN id <= 200 THEN 'subject: a space' ELSE 'held: behind a row' END WHERE aggregate_id < 100 AND id <= 200000`)
		b.exec(`UPDATE outbox_messages SET processed_at = now() WHERE last_error IS NULL AND id % 2 = 0`)
	}
	b.exec(`ANALYZE`)
}

// TestWaiting lists a hundred aggregates with a thousand rows each, and looks at fewer rows where a console has too
// little time for all.
func TestWaiting(t *testing.T) {
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			b := newBench(t, testenv.SharedPostgres(t), mark)
			b.fillWaiting()
			db, err := table.OpenConsole(t.Context(), b.config(), testenv.Patience)
			b.must(err)
			defer db.Close()
			begun := time.Now()
			all, total, more, err := db.Waiting(t.Context(), b.table, 100_000, 30)
			took := time.Since(begun)
			b.must(err)
			t.Logf("it took %s", took)
			if total != 100 || len(all) != 30 || !more {
				t.Fatalf("%d of %d aggregates are listed; more: %t", len(all), total, more)
			}
			w := all[0]
			if w.Rows != 1000 || *w.TenantID != "7" || *w.AggregateType != "order" || *w.ParkedID != "1" || *w.EventType != "order.placed" || w.Attempts != 3 ||
				w.Error != "subject: a space" || w.Outbox != "public.outbox_messages" || !w.RetryAt.Equal(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)) ||
				time.Since(*w.Since) > time.Hour {
				t.Errorf("the first is %+v", w)
			}
			begun = time.Now()
			few, _, more, err := db.Waiting(t.Context(), b.table, 200_000, 1000)
			took = min(took, time.Since(begun)) // either may have been held up
			b.must(err)
			if len(few) != 100 || more {
				t.Errorf("%d aggregates are listed; more: %t", len(few), more)
			}
			b.must(db.Limit(t.Context(), took/4))
			some, _, more, err := db.Waiting(t.Context(), b.table, 100_000, 1000)
			b.must(err)
			rows := 0
			for _, w := range some {
				rows += w.Rows
			}
			if rows == 0 || rows >= 100_000 || !more {
				t.Errorf("in too little time %d rows are looked at; more: %t", rows, more)
			}
		})
	}
}

// TestWaitingOfAnyTable: ids and times of other types, no aggregates, a retry time within the failure, hostile texts.
func TestWaitingOfAnyTable(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TABLE strange (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), key text, type text, made timestamp DEFAULT '2026-02-03 04:05:06',
		payload text, done timestamptz, tries int, why text)`)
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "aggregate_id": "key", "event_type": "type", "payload": "payload", "occurred_at": "made",
		"processed_at": "done", "attempts": "tries", "last_error": "why",
	})
	b.must(err)
	box := &outbox.Table{Schema: "public", Name: "strange", Layout: layout, Mark: outbox.MarkUpdate}
	b.must(b.db.CheckTable(t.Context(), box))
	hostile := "<script>\x1b[31m\u202e\\u0000'\"" + strings.Repeat("x", 1<<20)
	b.exec(`INSERT INTO strange (key, type, payload, tries, why) VALUES ($1, $1, $1, 1, 'retry after 2026-03-04T05:06:07.000008Z: size: ' || $1)`, hostile)
	b.exec(`INSERT INTO strange (key, type, payload, tries, why) VALUES ($1, 'x', '', NULL, 'held: x')`, hostile)
	b.exec(`INSERT INTO strange (key, type, payload, tries, why) SELECT NULL, 'x', '', 2, 'subject: x' FROM generate_series(1, 2)`)
	b.exec(`INSERT INTO strange (key, type, payload, tries, why) VALUES ('held alone', 'x', '', 0, 'held: x')`)
	all, total, more, err := b.db.Waiting(t.Context(), box, 1000, 10)
	b.must(err)
	if total != 4 || len(all) != 4 || more {
		t.Fatalf("%d of %d aggregates: %+v", len(all), total, all)
	}
	w := all[0]
	if w.Rows != 2 || *w.AggregateID != string([]rune(hostile)[:256]) || w.TenantID != nil || w.AggregateType != nil || w.ParkedID == nil ||
		!strings.HasPrefix(w.Error, "size: <script>") || len(w.Error) > 4200 || w.Attempts != 1 ||
		w.RetryAt == nil || w.RetryAt.Nanosecond() != 8000 || w.Since.Format(time.RFC3339) != "2026-02-03T04:05:06Z" {
		t.Errorf("the aggregate with a hostile id is %.300v", w)
	}
	for _, w := range all[1:] {
		if w.AggregateID != nil && (w.ParkedID != nil || *w.AggregateID != "held alone") {
			t.Errorf("the row that is held alone is %+v", w)
		}
	}
}
