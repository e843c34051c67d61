// Package migrations creates walpost's tables and its publication.
//
// The tables are plain SQL files. They only ever go forward: up creates, it never drops a table that holds a
// row, and never takes a lock that a producer would wait for. A [Runner] applies them to a database under an
// advisory lock; [Print] writes them as plain SQL for those who have a migration tool of their own. Each
// belongs to a [Group], and a database may get the groups one by one.
//
// The publication is not one of the files, because its name and its tables come from the configuration:
// package stream creates it.
package migrations

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

const (
	// Latest is every migration there is, as the target of [Runner.Up] and [Print].
	Latest int64 = math.MaxInt64
	// OneStep is the migration applied last, as the target of [Runner.Down].
	OneStep int64 = -1
)

// ErrNoVersion means that there is no migration of the version that was asked for.
var ErrNoVersion = errors.New("no such version")

// checkTarget reports a version that does not exist: a typing error must not pass for "nothing to do". Zero
// is a target of Down. Each group counts its own versions, and so every other number needs a group.
func checkTarget(to, least int64, only []Group) error {
	if to == least && to == 0 {
		return nil
	}
	if len(only) != 1 {
		return hint.Errorf("name the group with --only: each group counts its own versions",
			"find migration %d without a group: %w", to, ErrNoVersion)
	}
	last := int64(0)
	for _, l := range linesOf(only) {
		last = max(last, int64(len(l.steps)))
	}
	if to < least || to > last {
		versions := fmt.Sprintf("the versions are %d to %d: see `walpost migrate status`", least, last)
		return hint.Errorf(versions, "find migration %d in group %s: %w", to, only[0], ErrNoVersion)
	}
	return nil
}

// CheckOutboxes refuses an outbox that does not exist, unless a migration makes it in the schema. It changes
// nothing.
func CheckOutboxes(ctx context.Context, conn *pgx.Conn, outboxes []*outbox.Table, schema string) error {
	for _, t := range outboxes {
		exists := slices.ContainsFunc(lines, func(l *line) bool { return l.makes(t, schema) })
		if exists {
			continue
		}
		err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, t.SQL()).Scan(&exists)
		if err != nil {
			return fmt.Errorf("look for %s: %w", t, err)
		}
		if !exists {
			advice := fmt.Sprintf("create the table first, or check outboxes[].table, outboxes[].layout "+
				"and postgres.schema: migrations make %[1]s.outbox_messages for layout canonical, "+
				"and %[1]s.outbox_events for append", schema)
			return hint.Errorf(advice, "table %s does not exist, and the migrations do not make it", t)
		}
	}
	return nil
}
