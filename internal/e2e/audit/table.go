package audit

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// ReadTable reads every row of an outbox in one snapshot. order is an SQL
// expression (bigint) over the table as t for a row's place in its aggregate:
// where writers exclude each other and the sequence is not cached, its id.
func ReadTable(ctx context.Context, conn *pgx.Conn, t *outbox.Table, order string) ([]Row, error) {
	pending := "false"
	if t.Layout.Has(outbox.ProcessedAt) {
		pending = "t." + t.Column(outbox.ProcessedAt) + " IS NULL"
	}
	sql := fmt.Sprintf(`SELECT concat(t.%s), %s, %s, (%s)::bigint, concat(t.%s), %s FROM %s t`,
		t.Column(outbox.ID), t.HashSQL("t"), aggregateSQL(t), order,
		t.Column(outbox.Payload), pending, t.SQL())
	result, err := conn.Query(ctx, sql)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t, err)
	}
	r := Row{Ref: outbox.Ref{Table: t}}
	var hash int64
	var rows []Row
	columns := []any{&r.Ref.ID, &hash, &r.Aggregate, &r.Order, &r.Payload, &r.Pending}
	_, err = pgx.ForEachRow(result, columns, func() error {
		r.Ref.Hash = uint64(hash)
		rows = append(rows, r)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t, err)
	}
	return rows, nil
}

func aggregateSQL(t *outbox.Table) string {
	columns := "''"
	for _, f := range []outbox.Field{outbox.TenantID, outbox.AggregateType, outbox.AggregateID} {
		if t.Layout.Has(f) {
			columns += ", t." + t.Column(f)
		}
	}
	return "concat_ws('/', " + columns + ")"
}
