package badinput

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

// TestApplicationPrivileges: in a database that has one group of tables, deploy/grants.sql lets an
// application's role read and write the rows of that group, and change no table.
func TestApplicationPrivileges(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	for group, write := range map[migrations.Group]string{
		migrations.Consumer: `INSERT INTO consumer_offsets (consumer_name) VALUES ('c');
			SELECT FROM consumer_offsets FOR UPDATE; UPDATE consumer_offsets SET last_processed_id = 1;
			INSERT INTO consumer_definitions (consumer_name, stream, partitions, start_at, start_sequence)
				VALUES ('c', 's', 1, 'all', 0); DELETE FROM consumer_definitions`,
		migrations.Idempotency: `INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token) VALUES (0, 's', 'k', '', gen_random_uuid());
			SELECT FROM idempotency_keys FOR UPDATE; DELETE FROM idempotency_keys`,
	} {
		t.Run(string(group), func(t *testing.T) {
			s := *s
			s.t = t
			name := "only_" + string(group)
			s.must(s.pg.Exec(t.Context(), "postgres", "CREATE ROLE "+name+" LOGIN"))
			s.must(s.pg.Exec(t.Context(), "postgres", "CREATE DATABASE "+name))
			cfg, err := pgx.ParseConfig(s.pg.URL(name))
			s.must(err)
			r := migrations.New(cfg, nil, group)
			defer r.Close()
			_, err = r.Up(t.Context(), migrations.Latest)
			s.must(err)
			s.grant(name, map[string]string{string(group): name})
			conn, err := pgx.Connect(t.Context(), s.pg.URLFor(name, name))
			s.must(err)
			defer conn.Close(t.Context())
			_, err = conn.Exec(t.Context(), write)
			s.must(err)
			for _, table := range group.Tables() {
				s.denied(conn, `TRUNCATE `+table)
			}
			s.denied(conn, `SELECT FROM walpost_migrations_`+string(group))
		})
	}
}
