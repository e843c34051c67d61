package badinput

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/testenv"
)

// poolerCases connect through pgbouncer: one that knows of no other start-up
// parameters than its own, and some that were told to let all of them pass.
func poolerCases(s *site) []badStart {
	const lenient = "extra_float_digits, intervalstyle, bytea_output, client_min_messages, wal_sender_timeout, replication"
	cases := []badStart{{name: "pooler_strict"}, {name: "pooler_transaction"}, {name: "pooler_round_robin"}}
	settings := []map[string]string{
		{"pool_mode": "transaction"},
		{"pool_mode": "transaction", "ignore_startup_parameters": lenient},
		{"pool_mode": "transaction", "ignore_startup_parameters": lenient, "server_round_robin": "1"},
	}
	if !testenv.PoolerReplicates() {
		cases = append(cases, badStart{name: "pooler_session"}, badStart{name: "pooler_session_lenient"})
		settings = append(settings,
			map[string]string{"pool_mode": "session", "ignore_startup_parameters": "extra_float_digits, intervalstyle, bytea_output"},
			map[string]string{"pool_mode": "session", "ignore_startup_parameters": lenient})
	}
	for i := range cases {
		pooler := testenv.NewPooler(s.t, s.pg, settings[i])
		if pooler == nil {
			s.t.Logf("NOT SHOWN: pgbouncer is not installed, so nothing here says what the relay does behind a pooler: %s",
				names(cases))
			return nil
		}
		address := fmt.Sprintf("127.0.0.1:%d", pooler.Port())
		s.called(address, "POOLER")
		cases[i].pooler = "postgres://postgres@" + address + "/" + ready + "?sslmode=disable"
		cases[i].env = map[string]string{"WALPOST_POSTGRES_URL": cases[i].pooler}
	}
	return cases
}

func names(cases []badStart) []string {
	all := make([]string, len(cases))
	for i := range cases {
		all[i] = cases[i].name
	}
	return all
}

// pooled lists what is set in the session that the next client of a pooler
// gets: what the relay left there would be the application's.
func pooled(ctx context.Context, url string) (left []string, err error) {
	conn, err := pgconn.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	results, err := conn.Exec(ctx, `SELECT name, setting FROM pg_settings WHERE source = 'session'
			AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')
		UNION ALL SELECT 'prepared statement', name FROM pg_prepared_statements`).ReadAll()
	if err != nil {
		return nil, err
	}
	for _, row := range results[0].Rows {
		left = append(left, fmt.Sprintf("%s %s", row[0], row[1]))
	}
	return left, nil
}
