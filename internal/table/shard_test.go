package table_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// shards are both halves of the table.
func (b *bench) shards() (all [2]*outbox.Table) {
	for i := range all {
		t := *b.table
		t.Shard = outbox.Shard{Index: i + 1, Of: 2}
		all[i] = &t
	}
	return all
}

// skip is a first start that marks what is pending.
func (b *bench) skip(tables ...*outbox.Table) ([]int64, error) {
	var starts []table.Start
	for _, box := range tables {
		starts = append(starts, table.Start{
			Sent: table.Sent{Outbox: box.String(), Shard: box.Shard.String(), Initial: "none"}, Table: box, Skips: true,
		})
	}
	return table.Begin(b.t.Context(), b.config(), starts)
}

// TestSkipPendingOfEachShard: each of them skips what is its own.
func TestSkipPendingOfEachShard(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	const rows = 20
	b.exec(fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'a', g, 'b.c', '{}' FROM generate_series(1, %d) g`, rows))
	skipped := int64(0)
	for _, box := range b.shards() {
		n, err := b.skip(box)
		b.must(err)
		if n[0] == 0 {
			t.Errorf("shard %s has skipped nothing", box.Shard)
		}
		skipped += n[0]
	}
	if skipped != rows {
		t.Errorf("%d of %d rows were skipped", skipped, rows)
	}
}

// TestMarksOfAShard: there may be many of another one's between them.
func TestMarksOfAShard(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	shards := b.shards()
	aggregateOf := func(box *outbox.Table) string {
		return b.text(`SELECT aggregate_id FROM (SELECT x::bigint AS aggregate_id, 0::bigint AS id FROM generate_series(1, 100) x) t WHERE ` + box.ShardSQL("t") + ` LIMIT 1`)
	}
	own, other := aggregateOf(shards[1]), aggregateOf(shards[0])
	marked := func(n int, aggregate string) {
		b.exec(fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at)
			SELECT 'a', %s, 'b.c', '{}', now() + g * interval '1 microsecond' FROM generate_series(1, %d) g`, aggregate, n))
	}
	has := func(want bool) {
		t.Helper()
		if got, err := b.db.HasMarks(t.Context(), shards[1]); err != nil || got != want {
			t.Errorf("the shard has marks: %v, %v", got, err)
		}
	}
	marked(12_000, other)
	has(false)
	for range 3 {
		marked(2, own)
		marked(7_000, other)
	}
	has(true)
	var next table.MarkCursor
	var ids []string
	for {
		rows, err := b.db.MarkedSince(t.Context(), shards[1], time.Time{}, &next, 4)
		b.must(err)
		for _, row := range rows {
			ids = append(ids, row.ID)
		}
		if len(rows) < 4 {
			break
		}
	}
	if want := b.text(`SELECT string_agg(id::text, ' ' ORDER BY processed_at, id) FROM outbox_messages WHERE aggregate_id = ` + own); strings.Join(ids, " ") != want {
		t.Errorf("marked %v, want %s", ids, want)
	}
	if rows, err := b.db.MarkedSince(t.Context(), shards[0], time.Time{}, &table.MarkCursor{}, 40_000); err != nil || len(rows) != 33_000 {
		t.Errorf("%d marked rows of the other shard: %v", len(rows), err)
	}
}

// TestMarksOfAShardWithItsOwnColumns: the archive has columns of the canonical table only.
func TestMarksOfAShardWithItsOwnColumns(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'b.c', '{}')`)
	b.delivered(1, "2 hours", "2 hours")
	if r := b.retain(); r.Tables[0].Archived != 1 {
		t.Fatalf("report %+v", r)
	}
	b.exec(`CREATE TABLE other (LIKE outbox_messages INCLUDING ALL); ALTER TABLE other RENAME aggregate_id TO owner`)
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload", "aggregate_id": "owner", "processed_at": "processed_at"})
	b.must(err)
	box := &outbox.Table{Schema: "public", Name: "other", Layout: layout, Mark: outbox.MarkUpdate, Shard: outbox.Shard{Index: 1, Of: 2}}
	b.must(b.db.CheckTable(t.Context(), box))
	if has, err := b.db.HasMarks(t.Context(), box); err != nil || has {
		t.Errorf("it has marks: %v, %v", has, err)
	}
	canonical := false
	for _, shard := range b.shards() {
		has, err := b.db.HasMarks(t.Context(), shard)
		b.must(err)
		canonical = canonical || has
	}
	if !canonical {
		t.Error("the archived row is of no shard")
	}
}
