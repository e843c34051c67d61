package table_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestOthersFollowTheirTables: the rows of outboxes that are not configured have the present names of their tables, and after a
// dump their OIDs. Two tables whose names look the same with a dot in them break nothing.
func TestOthersFollowTheirTables(t *testing.T) {
	t.Parallel()
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE SCHEMA a; CREATE SCHEMA "a.b"; CREATE TABLE a."b.c" (); CREATE TABLE "a.b".c (); CREATE TABLE here (); CREATE TABLE there ();
		INSERT INTO outbox_known (outbox, condition, system_id, database_oid, own_oid, table_oid, timeline, partitions, table_name, source)
		SELECT v.outbox, '', v.system_id, k.database_oid, k.own_oid, v.relation, 1, 0, v.name, 'test'
		FROM outbox_known k CROSS JOIN LATERAL (VALUES ('here', k.system_id, 'here'::regclass::oid, 'public.before'), ('there', 'another', 1, 'public.there'),
			('dots', 'another', 1, 'a.b.c'), ('gone', 'another', 1, 'public.gone')) v (outbox, system_id, relation, name)`)
	b.must(b.db.Know(t.Context(), b.table, "test"))
	for outbox, want := range map[string]string{"here": "here true public.here", "there": "there true public.there", "gone": "- false public.gone"} {
		b.is(outbox, b.text(`SELECT coalesce((SELECT relname::text FROM pg_class WHERE oid = k.table_oid), '-') || ' ' ||
			(k.system_id = (SELECT system_id FROM outbox_known WHERE outbox = 'public.outbox_messages')) || ' ' || k.table_name
			FROM outbox_known k WHERE outbox = '`+outbox+`'`), want)
	}
}
