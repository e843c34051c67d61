package retention_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestDeleteAfter: of an outbox without an archive, delivered rows go that are old enough, and no other one.
func TestDeleteAfter(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id text, topic text, aggregate_type text, aggregate_id text,
			partition_key text, payload jsonb, headers jsonb, trace_id text, status smallint, attempts int, next_retry_at timestamptz,
			created_at timestamptz, processed_at timestamptz);
		CREATE VIEW left_over AS SELECT string_agg(message_id, ' ' ORDER BY message_id) AS ids, count(*) AS n FROM outbox`)
	l, _ := outbox.LayoutNamed("eventferry")
	box := &outbox.Table{Schema: "public", Name: "outbox", Layout: l, Mark: outbox.MarkUpdate, Where: "topic <> 'other'"}
	deleteAfter := func(o *retention.Options) { o.Tables, o.DeleteAfter = []*outbox.Table{box}, time.Hour }

	b.exec(`INSERT INTO outbox (message_id, topic, status, processed_at)
		SELECT concat('gone', i), 'a', 2, now() - interval '2 hours' FROM generate_series(1, 3000) i`)
	b.exec(`INSERT INTO outbox (message_id, topic, status, processed_at) VALUES
		('young', 'a', 2, now()), ('pending', 'a', 0, now() - interval '2 hours'), ('null', 'a', NULL, now() - interval '2 hours'),
		('failed', 'a', 3, now() - interval '2 hours'), ('dead', 'a', 4, now() - interval '2 hours'), ('other', 'other', 2, now() - interval '2 hours'),
		('undated', 'a', 2, NULL)`)
	r := b.retain(deleteAfter)
	if got := r.Tables[0]; !got.Obstacle || got.Deleted != 0 {
		t.Errorf("without an index: %+v", got)
	}
	b.exec(`CREATE INDEX ON outbox (processed_at) WHERE processed_at IS NOT NULL`)
	if r = b.retain(func(o *retention.Options) { o.Tables = []*outbox.Table{box} }); r.Tables[0].Deleted != 0 {
		t.Errorf("it is off: %+v", r.Tables[0])
	}
	if r = b.retain(deleteAfter); r.Tables[0].Deleted != 3000 || len(r.Complaints()) > 0 {
		t.Errorf("%+v %v", r.Tables[0], r.Complaints())
	}
	b.wantText("rows that are left", `SELECT ids FROM left_over`, "dead failed null other pending undated young")
	if r = b.retain(deleteAfter); r.Tables[0].Deleted != 0 {
		t.Errorf("a second pass: %+v", r.Tables[0])
	}
}

// TestDeleteJournaled: delivered rows of an append-only outbox go with their entries, and no other one does.
func TestDeleteJournaled(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		b.table.Layout = b.table.Layout.Journaled()
		b.exec(strings.Join(table.AppendOnlySQL(b.table, "public."+table.AppendOnly), ";"))
		b.insert(3000)
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_messages', 'stored', int8multirange(int8range(n * 100 + 1, n * 100 + 91)), now() - interval '2 hours' + n * interval '1 second'
			FROM generate_series(0, 27) n
			UNION ALL SELECT 'public.outbox_messages', 'dead', '{[95,96),[97,98)}', now() - interval '2 hours'
			UNION ALL SELECT 'public.outbox_messages', 'stored', '{[2801,2901)}', now()
			UNION ALL SELECT 'public.other', 'stored', '{[2901,2951)}', now() - interval '2 hours'`)
		b.exec(`INSERT INTO outbox_deferred (outbox, id, last_error) VALUES ('public.outbox_messages', 2999, 'held: x'), ('public.outbox_messages', 4000, 'held: x'),
			('public.other', 4000, 'held: x')`)
		r := b.retain()
		b.wantText("deferrals that are left", `SELECT string_agg(concat(outbox, id), ' ' ORDER BY outbox) FROM outbox_deferred`, "public.other4000 public.outbox_messages2999")
		if got := r.Tables[0]; got.Deleted != 0 || got.Skipped != "processed rows stay" {
			t.Errorf("it is off: %+v", got)
		}
		b.exec(testenv.SettledTo("public.outbox_messages", 100, ""))
		r = b.retain(func(o *retention.Options) { o.DeleteAfter = time.Hour })
		if got := r.Tables[0]; got.Deleted != 90+2 || len(r.Complaints()) > 0 {
			t.Errorf("up to the progress: %+v %v", got, r.Complaints())
		}
		b.exec(`UPDATE outbox_known SET unsettled = int8multirange(int8range(3000, NULL, '()'))`)
		r = b.retain(func(o *retention.Options) { o.DeleteAfter = time.Hour })
		if got := r.Tables[0]; got.Deleted != 27*90 || len(r.Complaints()) > 0 {
			t.Errorf("%+v %v", got, r.Complaints())
		}
		b.wantText("rows that are left", `SELECT concat(count(*), ' ', min(id), ' ', count(*) FILTER (WHERE id > 2800)) FROM outbox_messages`, "478 91 200")
		b.wantText("entries that are left", `SELECT string_agg(concat(outbox, ids), ' ' ORDER BY outbox) FROM outbox_journal`, "public.other{[2901,2951)} public.outbox_messages{[2801,2901)}")
	})
}
