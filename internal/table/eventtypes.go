package table

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// VersionCount is how many rows have an event type and version. Version is empty where the row has none, or
// the layout no column for it.
type VersionCount struct {
	EventType, Version string
	Rows               int
}

// EventTypes counts the types of the newest rows by id, so many at most: a table of any size is read by its
// key, from the end.
func (db *DB) EventTypes(ctx context.Context, t *outbox.Table, newest int) (all []VersionCount, err error) {
	version := "NULL"
	if t.Layout.Has(outbox.EventVersion) {
		version = t.Column(outbox.EventVersion)
	}
	sql := fmt.Sprintf(`SELECT coalesce(s.type::text, ''), coalesce(s.version::text, ''), count(*)::int
		FROM (SELECT %s AS type, %s AS version FROM %s ORDER BY %s DESC LIMIT $1) s
		GROUP BY 1, 2 ORDER BY 1, 2`,
		t.Column(outbox.EventType), version, t.SQL(), t.Column(outbox.ID))
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, sql, newest)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[VersionCount])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count event types of %s: %w", t, err)
	}
	return all, nil
}
