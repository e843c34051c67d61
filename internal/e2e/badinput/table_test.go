package badinput

import (
	"strings"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// appendOnly makes the outbox one for mark journal.
var appendOnly = strings.Join(table.AppendOnlySQL(
	&outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical()}, "public."+table.AppendOnly), ";") + ";"

// tableCases have an outbox that does not fit.
func tableCases() []badStart {
	return []badStart{
		{name: "table_misspelt", env: map[string]string{"WALPOST_TABLE": "outbox_mesages"}},
		{name: "table_missing", env: map[string]string{"WALPOST_TABLE": "shop.outbox"}},
		{name: "not_migrated", sql: `DROP TABLE outbox_messages`},
		{
			name: "table_is_view",
			sql:  `CREATE VIEW outbox AS SELECT * FROM outbox_messages`,
			env:  map[string]string{"WALPOST_TABLE": "outbox"},
		},
		{name: "table_unlogged", sql: `ALTER TABLE outbox_messages SET UNLOGGED`},
		{name: "columns_missing", sql: `ALTER TABLE outbox_messages DROP attempts, DROP trace_id`},
		{name: "available_at_text", sql: `ALTER TABLE outbox_messages ALTER available_at DROP DEFAULT, ALTER available_at TYPE text`},
		{name: "processed_at_boolean", sql: `DROP INDEX outbox_messages_processed_idx; ALTER TABLE outbox_messages DROP processed_at; ALTER TABLE outbox_messages ADD processed_at boolean`},
		{name: "generated", sql: `ALTER TABLE outbox_messages DROP trace_id, ADD trace_id text GENERATED ALWAYS AS (payload ->> 'trace') STORED`},
		{
			name: "initial_unsaid",
			sql: `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', 1, 'placed', '{}' FROM generate_series(1, 100001)`,
		},
		{
			name: "layout_without_column",
			sql: `CREATE TABLE outbox (id bigint PRIMARY KEY, topic text, aggregate_type text, aggregate_id text, payload jsonb, status smallint DEFAULT 0,
				attempts int, next_retry_at timestamptz, created_at timestamptz, processed_at timestamptz, trace_id text, message_id text, partition_key text)`,
			env: map[string]string{"WALPOST_TABLE": "outbox", "WALPOST_LAYOUT": "eventferry"},
		},
		{
			name: "status_type", sql: `ALTER TABLE outbox_messages ADD status smallint NOT NULL DEFAULT 0`,
			env: map[string]string{"WALPOST_MARK": "status=sent"},
		},
		{
			name: "status_without_default", sql: `ALTER TABLE outbox_messages ADD status text NOT NULL`,
			env: map[string]string{"WALPOST_MARK": "status=sent"},
		},
		{name: "status_missing", env: map[string]string{"WALPOST_MARK": "status=sent"}},
		{name: "header_missing", env: map[string]string{"WALPOST_HEADERS": "message_id"}},
		{name: "where_broken", env: map[string]string{"WALPOST_WHERE": "tenant_id <>"}},
		{name: "where_column", env: map[string]string{"WALPOST_WHERE": "status <> 4"}},
		{name: "where_no_condition", env: map[string]string{"WALPOST_WHERE": "event_version"}},
		{name: "where_two", env: map[string]string{"WALPOST_WHERE": "true); DROP TABLE outbox_messages; SELECT (true"}},
		{name: "where_subquery", env: map[string]string{"WALPOST_WHERE": "id > (SELECT min(attempts) FROM public.outbox_messages)"}},
		{
			name: "where_function",
			sql:  `CREATE FUNCTION takes(bigint) RETURNS bool IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN RETURN true; END $$`,
			env:  map[string]string{"WALPOST_WHERE": "public.takes(tenant_id)"},
		},
		{name: "append_only", env: map[string]string{"WALPOST_MARK": "journal"}},
		{
			name: "journal_missing", sql: appendOnly + `DROP TABLE outbox_deferred`,
			env: map[string]string{"WALPOST_MARK": "journal"},
		},
		{
			name: "other_marks", sql: `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at)
				VALUES ('order', 1, 'order.placed', '{}', now());` + appendOnly,
			env: map[string]string{"WALPOST_MARK": "journal"},
		},
		{
			name: "journaled_marks", sql: appendOnly + `INSERT INTO outbox_journal (outbox, kind, ids) VALUES ('public.outbox_messages', 'stored', '{[1,4)}')`,
			env: map[string]string{"WALPOST_MARK": "delete"},
		},
		{
			name: "dated_marks", sql: `ALTER TABLE outbox_messages ADD status smallint NOT NULL DEFAULT 0;
				INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', 1, 'order.placed', '{}', now())`,
			env: map[string]string{"WALPOST_MARK": "status=2"},
		},
		{name: "refuses_update", sql: appendOnly},
		{name: "replica_identity", sql: `ALTER TABLE outbox_messages REPLICA IDENTITY NOTHING; CREATE PUBLICATION theirs FOR TABLE outbox_messages`},
		{
			name: "other_name", env: map[string]string{"WALPOST_OUTBOX_NAME": "orders"},
			sql: testenv.SettledTo("public.outbox_messages", 0, "") + `; UPDATE outbox_known SET own_oid = 'outbox_known'::regclass,
				system_id = (SELECT system_identifier FROM pg_control_system()), database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())`,
		},
		{
			name: "ids_again", sql: appendOnly + testenv.SettledTo("public.outbox_messages", 1000, ""),
			env: map[string]string{"WALPOST_MARK": "journal"},
		},
		{name: "id_without_index", sql: `ALTER TABLE outbox_messages DROP CONSTRAINT outbox_messages_pkey; DROP INDEX outbox_messages_pending_idx`},
	}
}

// publicationCases have a publication that would hide something.
func publicationCases() []badStart {
	return []badStart{
		{name: "no_inserts", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'update, delete')`},
		{name: "another_table", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages_dlq`},
		{name: "row_filter", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages WHERE (tenant_id = 7) WITH (publish = 'insert')`},
		{
			name: "where_unpublished", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert')`,
			env: map[string]string{"WALPOST_WHERE": "tenant_id IN (1, 2)"},
		},
		{
			name: "where_other", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages WHERE (tenant_id IN (1, 3)) WITH (publish = 'insert')`,
			env: map[string]string{"WALPOST_WHERE": "tenant_id IN (1, 2)"},
		},
		{name: "column_list", sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages (id, event_type) WITH (publish = 'insert')`},
		{
			name: "leaves",
			sql: `CREATE TABLE parts (LIKE outbox_messages INCLUDING DEFAULTS) PARTITION BY RANGE (id);
				CREATE TABLE parts1 PARTITION OF parts DEFAULT; CREATE UNIQUE INDEX ON parts (id);
				CREATE PUBLICATION walpost FOR TABLE parts WITH (publish = 'insert', publish_via_partition_root = false)`,
			env: map[string]string{"WALPOST_TABLE": "parts"},
		},
		{
			name: "all_tables_leaves",
			sql: `CREATE TABLE parts (LIKE outbox_messages INCLUDING DEFAULTS) PARTITION BY RANGE (id);
				CREATE TABLE parts1 PARTITION OF parts DEFAULT; CREATE UNIQUE INDEX ON parts (id);
				CREATE PUBLICATION walpost FOR ALL TABLES WITH (publish = 'insert')`,
			env: map[string]string{"WALPOST_TABLE": "parts"},
		},
	}
}

// slotCases find a slot that is somebody else's.
func slotCases(s *site) []badStart {
	s.newDB("elsewhere", `SELECT pg_create_logical_replication_slot('slot_elsewhere', 'pgoutput')`)
	s.must(s.pg.Exec(s.t.Context(), "postgres", `SELECT pg_create_physical_replication_slot('slot_physical')`))
	return []badStart{
		{name: "slot_elsewhere"},
		{name: "slot_physical"},
		{name: "slot_plugin", sql: `SELECT pg_create_logical_replication_slot('slot_plugin', 'test_decoding')`},
		{name: "slot_two_phase", sql: `SELECT pg_create_logical_replication_slot('slot_two_phase', 'pgoutput', false, true)`},
		{name: "slot_new_taken", sql: `SELECT pg_create_logical_replication_slot('slot_new_taken_new', 'pgoutput')`},
	}
}
