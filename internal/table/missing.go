package table

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// adviseMissing is what helps where an outbox does not exist: `walpost migrate` makes tables of two names,
// and a table of another name may be spelt wrongly.
func adviseMissing(ctx context.Context, conn *pgx.Conn, t *outbox.Table) string {
	if t.Name == outbox.DefaultTable || t.Name == outbox.AppendTable {
		return "run `walpost migrate up`, or name the table in outboxes[].table"
	}
	const advice = "create the table, or name one that exists in outboxes[].table"
	rows, _ := conn.Query(ctx, `SELECT concat(n.nspname, '.', c.relname)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
			AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1 LIMIT 10000`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return advice // it is only a guess
	}
	if guess := hint.DidYouMean(t.Relation(), names); guess != "" {
		return advice + "; " + guess
	}
	return advice
}
