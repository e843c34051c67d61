package stream_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// TestPublicationScript: of a publication that is there, the script makes what EnsurePublication makes of it.
func TestPublicationScript(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	tables := []*outbox.Table{
		{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		{Schema: "public", Name: `Odd 'one"`, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
	}
	const name = `it's "mine"`
	for was, make := range map[string]string{
		"nothing":     ``,
		"left behind": `CREATE PUBLICATION "it's ""mine"""`,
		"one table":   `CREATE PUBLICATION "it's ""mine""" FOR TABLE outbox_messages`,
		"no inserts":  `CREATE PUBLICATION "it's ""mine""" WITH (publish = 'delete')`,
	} {
		t.Run(was, func(t *testing.T) {
			var made, failed [2]string
			for i := range made {
				conn, err := pgx.Connect(t.Context(), pg.NewDB(t))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close(context.Background()) //nolint:errcheck // the test is over
				create := `CREATE TABLE outbox_messages (id bigint); CREATE TABLE "Odd 'one""" (id bigint); ` + make
				if _, err = conn.Exec(t.Context(), create); err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					_, err = stream.EnsurePublication(t.Context(), conn, name, tables)
				} else {
					_, err = conn.Exec(t.Context(), stream.EnsurePublicationSQL(name, tables))
				}
				if err != nil {
					failed[i] = err.Error()
				}
				err = conn.QueryRow(t.Context(), `SELECT coalesce(string_agg(concat(p.pubname, ' ', pubviaroot, ' ', tablename), ', ' ORDER BY tablename), '')
					FROM pg_publication p JOIN pg_publication_tables USING (pubname)`).Scan(&made[i])
				if err != nil {
					t.Fatal(err)
				}
			}
			const refused = "does not publish inserts"
			if strings.Contains(failed[0], refused) != strings.Contains(failed[1], refused) || made[0] != made[1] || (made[0] == "") != (failed[0] != "") {
				t.Errorf("EnsurePublication makes %q (%s), the script %q (%s)", made[0], failed[0], made[1], failed[1])
			}
		})
	}
}
