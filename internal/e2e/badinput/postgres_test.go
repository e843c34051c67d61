package badinput

// serverCases lead to the wrong PostgreSQL, or to none.
func serverCases(s *site) []badStart {
	s.rejectSomeRoles()
	silent := s.listen("SILENT")
	s.must(s.pg.Exec(s.t.Context(), "postgres", `CREATE DATABASE latin1 ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0`))
	return []badStart{
		{
			name: "silent_server", waits: true,
			env: map[string]string{"WALPOST_POSTGRES_URL": "postgres://relay:hunter2@" + silent + "/shop?sslmode=disable"},
		},
		{
			name: "nobody_listens", waits: true,
			env: map[string]string{"WALPOST_POSTGRES_URL": "postgres://relay:hunter2@127.0.0.1:1/shop"},
		},
		{
			name: "tls_wanted",
			env:  map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL(ready) + "&sslmode=require"},
		},
		{
			name: "broker_as_server",
			env:  map[string]string{"WALPOST_POSTGRES_URL": "postgres://relay@" + hostPort(s.nats.URL()) + "/shop?sslmode=disable"},
		},
		{
			name: "unknown_database",
			env:  map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("shop")},
		},
		{
			name: "not_utf8",
			env:  map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("latin1")},
		},
		{name: "unknown_role", user: "nobody_knows"},
		{
			name: "role_set",
			env:  map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL(ready) + "&options=-c%20role%3Dbad_scram"},
		},
		{
			name: "wrong_password", user: "bad_scram",
			env: map[string]string{"PGPASSWORD": "hunter2"},
		},
		{name: "no_password", user: "bad_scram"},
		{name: "no_hba_line", user: "bad_rejected"},
	}
}

// rejectSomeRoles puts lines before those that trust everybody.
func (s *site) rejectSomeRoles() {
	s.t.Helper()
	s.must(s.pg.Exec(s.t.Context(), "postgres", `CREATE ROLE bad_scram LOGIN REPLICATION PASSWORD 'right'; CREATE ROLE bad_rejected LOGIN REPLICATION`))
	s.must(s.pg.Exec(s.t.Context(), "postgres", `DO $$
		DECLARE hba text := current_setting('hba_file'); old text := pg_read_file(hba);
		BEGIN
			CREATE TEMP TABLE hba_lines (ord serial, line text);
			INSERT INTO hba_lines (line) VALUES ('host all bad_scram 127.0.0.1/32 scram-sha-256'), ('host all bad_rejected 127.0.0.1/32 reject');
			INSERT INTO hba_lines (line) SELECT regexp_split_to_table(old, E'\n');
			EXECUTE format('COPY (SELECT line FROM hba_lines ORDER BY ord) TO %L', hba);
		END $$`))
	s.must(s.pg.Reload(s.t.Context(), nil))
}

const publish = `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert');`

// roleCases connect as a role that lacks one thing.
func roleCases() []badStart {
	const letters = `GRANT SELECT, INSERT ON outbox_messages_dlq TO `
	const relay = `GRANT SELECT, UPDATE, DELETE ON outbox_messages TO `
	const known = `GRANT SELECT, INSERT, UPDATE ON outbox_known TO `
	role := func(name string, grants ...string) string {
		sql := publish + `CREATE ROLE ` + name + ` LOGIN REPLICATION;`
		for _, g := range grants {
			sql += g + name + `;`
		}
		return sql
	}
	return []badStart{
		{
			name: "no_replication", user: "bad_no_replication",
			sql: role("bad_no_replication", relay, letters) + `ALTER ROLE bad_no_replication NOREPLICATION`,
			env: map[string]string{"WALPOST_MODE": "stream"},
		},
		{
			name: "no_connect", user: "bad_no_connect",
			sql: role("bad_no_connect", relay, letters) + `REVOKE CONNECT ON DATABASE no_connect FROM PUBLIC`,
		},
		{
			name: "no_usage", user: "bad_no_usage",
			sql: role("bad_no_usage") + `CREATE SCHEMA app; ALTER TABLE outbox_messages SET SCHEMA app`,
			env: map[string]string{"WALPOST_TABLE": "app.outbox_messages"},
		},
		{name: "no_grants", user: "bad_no_grants", sql: role("bad_no_grants")},
		{
			name: "no_select", user: "bad_no_select",
			sql: role("bad_no_select", `GRANT UPDATE, DELETE ON outbox_messages TO `, letters),
		},
		{
			name: "no_update", user: "bad_no_update",
			sql: role("bad_no_update", `GRANT SELECT, UPDATE (attempts), DELETE ON outbox_messages TO `, letters),
		},
		{
			name: "no_delete", user: "bad_no_delete",
			sql: role("bad_no_delete", `GRANT SELECT, UPDATE ON outbox_messages TO `, letters),
		},
		{
			// FOR UPDATE wants UPDATE on a column, whichever.
			name: "no_lock", user: "bad_no_lock",
			sql: debeziumSQL + role("bad_no_lock", `GRANT SELECT, DELETE ON outbox TO `, letters) + `ALTER PUBLICATION walpost SET TABLE outbox`,
			env: debeziumEnv,
		},
		{
			name: "no_journal", user: "bad_no_journal",
			sql: appendOnly + role("bad_no_journal", relay, letters, `GRANT SELECT, INSERT ON outbox_journal TO `),
			env: map[string]string{"WALPOST_MARK": "journal"},
		},
		{name: "no_letters", user: "bad_no_letters", sql: role("bad_no_letters", relay)},
		{name: "no_dead_letters", sql: `DROP TABLE outbox_messages_dlq`},
		{
			name: "no_publication", user: "bad_no_publication",
			sql: role("bad_no_publication", relay, letters, known) + `DROP PUBLICATION walpost`,
		},
		{name: "no_known", user: "bad_no_known", sql: role("bad_no_known", relay, letters)},
		{
			name: "row_security", user: "bad_row_security",
			sql: role("bad_row_security", relay, letters, known) + `ALTER TABLE outbox_messages ENABLE ROW LEVEL SECURITY`,
		},
	}
}

const debeziumSQL = `CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL, type text NOT NULL, payload jsonb);`

var debeziumEnv = map[string]string{"WALPOST_TABLE": "outbox", "WALPOST_LAYOUT": "debezium", "WALPOST_MARK": "delete"}
