package badinput

import "strings"

// configCases are wrong before anything is connected to.
func configCases(s *site) []badStart {
	return []badStart{
		{name: "port_in_use", env: map[string]string{"WALPOST_HTTP_LISTEN": s.listen("TAKEN")}},
		{name: "postgres_url", code: 2, env: map[string]string{"WALPOST_POSTGRES_URL": "postgres://relay:hunter2@db:port/shop"}},
		{name: "postgres_scheme", code: 2, env: map[string]string{"WALPOST_POSTGRES_URL": "jdbc:postgresql://db/shop"}},
		{name: "postgres_bare_secret", code: 2, env: map[string]string{"WALPOST_POSTGRES_URL": "hunter2"}},
		{name: "nats_bare_secret", code: 2, env: map[string]string{"WALPOST_NATS_URL": "hunter2"}},
		{name: "nats_comma", code: 2, env: map[string]string{"WALPOST_NATS_URL": "nats://relay:hunter2,b@n1:4222"}},
		{name: "nats_url", code: 2, env: map[string]string{"WALPOST_NATS_URL": "http://relay:hunter2@n1:4222"}},
		{name: "unknown_key", code: 2, file: "postgres:\n  slotname: walpost\nnat:\n  url: nats://localhost\n"},
		{name: "bad_yaml", code: 2, file: "postgres:\n\tslot: walpost\n"},
		{name: "bad_duration", code: 2, env: map[string]string{"WALPOST_FALLBACK_INTERVAL": "30"}},
		{name: "bad_size", code: 2, env: map[string]string{"WALPOST_WINDOW_BYTES": "32 megs"}},
		{name: "bad_bool", code: 2, env: map[string]string{"WALPOST_SHARED": "yes"}},
		{name: "bad_number", code: 2, env: map[string]string{"WALPOST_WINDOW": "1e6"}},
		{name: "unknown_mode", code: 2, env: map[string]string{"WALPOST_MODE": "streaming"}},
		{name: "mark_none", code: 2, env: map[string]string{"WALPOST_MARK": "none"}},
		{name: "initial_none_delete", code: 2, env: map[string]string{"WALPOST_INITIAL": "none", "WALPOST_MARK": "delete"}},
		{name: "shared_fast", code: 2, env: map[string]string{"WALPOST_SHARED": "true", "WALPOST_BATCH": "fast"}},
		{name: "retained_without_unit", code: 2, env: map[string]string{"WALPOST_MAX_RETAINED_WAL": "10"}},
		{name: "user_without_password", code: 2, env: map[string]string{"WALPOST_NATS_URL": "nats://n1:4222", "WALPOST_NATS_USER": "relay"}},
		{name: "two_credentials", code: 2, env: map[string]string{"WALPOST_NATS_URL": "nats://relay:hunter2@n1:4222", "WALPOST_NATS_CREDS": "relay.creds"}},
		{name: "bad_initial", code: 2, env: map[string]string{"WALPOST_INITIAL": "all"}},
		{name: "bad_backoff", code: 2, env: map[string]string{"WALPOST_FALLBACK_BACKOFF": "0s"}},
		{name: "bad_on_poison", code: 2, env: map[string]string{"WALPOST_FALLBACK_ON_POISON": "drop"}},
		{name: "unknown_layout", code: 2, env: map[string]string{"WALPOST_LAYOUT": "debezum"}},
		{name: "debezium_update", code: 2, env: map[string]string{"WALPOST_LAYOUT": "debezium"}},
		{name: "source_with_spaces", code: 2, env: map[string]string{"WALPOST_SOURCE": "my shop"}},
		{name: "unknown_placeholder", code: 2, env: map[string]string{"WALPOST_SUBJECT": "events.{type}"}},
		{name: "wildcard", code: 2, env: map[string]string{"WALPOST_SUBJECT": "events.>"}},
		{name: "no_column_for_placeholder", code: 2, env: map[string]string{
			"WALPOST_LAYOUT": "debezium", "WALPOST_MARK": "delete", "WALPOST_SUBJECT": "events.{tenant_id}.{event_type}",
		}},
		{name: "table_twice", code: 2, file: "outboxes:\n  - table: outbox_messages\n  - table: public.outbox_messages\n"},
		{name: "name_twice", code: 2, file: "outboxes:\n  - {table: a, name: orders}\n  - {table: b, name: orders}\n"},
		{name: "name_too_long", code: 2, env: map[string]string{"WALPOST_OUTBOX_NAME": strings.Repeat("x", 128)}},
		{name: "slot_name", code: 2, env: map[string]string{"WALPOST_SLOT": "wal-post"}},
		{name: "stream_name", code: 2, env: map[string]string{"WALPOST_STREAM": "my.events"}},
	}
}
