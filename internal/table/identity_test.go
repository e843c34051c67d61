package table_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestReplicaIdentity: a table whose rows the server would not let a relay mark is found before a mark fails, with
// the statement that mends it.
func TestReplicaIdentity(t *testing.T) {
	const (
		all = `CREATE PUBLICATION everything FOR ALL TABLES;`
		// The index stays for the relay.
		noKey = `ALTER TABLE outbox_messages DROP CONSTRAINT outbox_messages_pkey; CREATE INDEX ON outbox_messages (id);`
		parts = `DROP TABLE outbox_messages; CREATE TABLE outbox_messages (LIKE outbox_messages_dlq) PARTITION BY RANGE (id);
			CREATE INDEX ON outbox_messages (id); ALTER TABLE outbox_messages ADD aggregate_version bigint, ADD headers jsonb;
			CREATE TABLE low PARTITION OF outbox_messages FOR VALUES FROM (0) TO (10);
			CREATE TABLE high PARTITION OF outbox_messages FOR VALUES FROM (10) TO (20);
			ALTER TABLE low REPLICA IDENTITY FULL;`
		full = `ALTER TABLE public.outbox_messages REPLICA IDENTITY FULL`
	)
	for _, c := range []struct {
		name, sql, hint string
		from            int // the first version that has it
	}{
		{name: "key", sql: all},
		{name: "inserts alone", sql: noKey + `CREATE PUBLICATION everything FOR ALL TABLES WITH (publish = 'insert')`},
		{name: "another table", sql: noKey + `CREATE PUBLICATION p FOR TABLE outbox_messages_dlq`},
		{name: "no key", sql: all + noKey, hint: full},
		{name: "named", sql: noKey + `CREATE PUBLICATION p FOR TABLE outbox_messages WITH (publish = 'delete')`, hint: full},
		{name: "nothing", sql: all + `ALTER TABLE outbox_messages REPLICA IDENTITY NOTHING`, hint: full},
		{name: "full", sql: all + noKey + full},
		{name: "partition", sql: all + parts, hint: `ALTER TABLE public.high REPLICA IDENTITY FULL`},
		{name: "schema", sql: noKey + `CREATE PUBLICATION p FOR TABLES IN SCHEMA public`, hint: full, from: 15},
		{name: "condition", sql: `CREATE PUBLICATION p FOR TABLE outbox_messages WHERE (tenant_id = 1)`, hint: `publish = 'insert'`, from: 15},
		{name: "columns", sql: `CREATE PUBLICATION p FOR TABLE outbox_messages (payload)`, hint: `publish = 'insert'`, from: 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
				if pg.Version() < c.from {
					t.Skipf("came with %d", c.from)
				}
				for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete} {
					b := newBench(t, pg, mark)
					b.exec(c.sql)
					err := b.db.CheckTable(t.Context(), b.table)
					if got := hint.CodeOf(err); (got == "table-replica-identity") != (c.hint != "") {
						t.Errorf("mark %s: %v (%q)", mark, err, got)
					}
					if !strings.Contains(hint.Of(err), c.hint) {
						t.Errorf("mark %s: hint %q, want %q", mark, hint.Of(err), c.hint)
					}
				}
			})
		})
	}
}
