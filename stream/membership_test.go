package stream_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// TestMembership: what a publication has a table by differs after every change of the publication that may have left
// out inserts, and only then.
func TestMembership(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		conn, err := pgx.Connect(t.Context(), pg.NewDB(t))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background()) //nolint:errcheck // the test is over
		table := &outbox.Table{Schema: "public", Name: "part", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		as := ""
		const nothing, other, same = "nothing", "something else", "the same"
		for _, step := range []struct{ sql, want string }{
			{`CREATE TABLE parent (id bigint) PARTITION BY RANGE (id); CREATE TABLE another (id bigint);
				CREATE TABLE part PARTITION OF parent FOR VALUES FROM (1) TO (9)`, nothing},
			{`CREATE PUBLICATION walpost FOR TABLE another`, nothing},
			{`ALTER PUBLICATION walpost ADD TABLE part`, other},
			{`INSERT INTO part VALUES (1)`, same},
			{`ALTER PUBLICATION walpost DROP TABLE another`, same},
			{`ALTER PUBLICATION walpost DROP TABLE part`, nothing},
			{`ALTER PUBLICATION walpost ADD TABLE part`, other},
			{`ALTER PUBLICATION walpost ADD TABLE parent`, other},
			{`ALTER PUBLICATION walpost DROP TABLE part`, other},
			{`ALTER PUBLICATION walpost SET (publish = 'update')`, nothing},
			{`ALTER PUBLICATION walpost SET (publish = 'insert')`, other},
			{`ALTER TABLE parent DETACH PARTITION part`, nothing},
			{`DROP PUBLICATION walpost; CREATE PUBLICATION walpost FOR ALL TABLES`, other},
			{`DROP PUBLICATION walpost`, nothing},
			{`DO $$ BEGIN
				IF current_setting('server_version_num')::int < 150000 THEN CREATE PUBLICATION walpost FOR ALL TABLES;
				ELSE CREATE PUBLICATION walpost FOR TABLES IN SCHEMA public; END IF; END $$`, other},
			{`CREATE SCHEMA elsewhere; ALTER TABLE another SET SCHEMA elsewhere`, same},
			{`DROP TABLE part`, nothing},
		} {
			if _, err := conn.Exec(t.Context(), step.sql); err != nil {
				t.Fatalf("%s: %v", step.sql, err)
			}
			m := stream.Membership{Publication: "walpost", Tables: []*outbox.Table{table}}
			if err := m.Take(t.Context(), conn); err != nil {
				t.Fatal(err)
			}
			got := other
			switch m.As(table) {
			case "":
				got = nothing
			case as:
				got = same
			}
			if got != step.want {
				t.Errorf("after %s: %s (%q after %q), want %s", step.sql, got, m.As(table), as, step.want)
			}
			if m.As(table) != "" {
				as = m.As(table)
			}
		}
	})
}
