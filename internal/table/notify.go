package table

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Announced reports whether inserts into every one of the tables are announced:
// the trigger is there, and not disabled.
func (db *DB) Announced(ctx context.Context, tables []*outbox.Table) (all bool, err error) {
	names := make([]string, len(tables))
	for i, t := range tables {
		names[i] = t.SQL()
	}
	err = db.QueryRow(ctx, []any{&all}, `SELECT coalesce(bool_and(EXISTS (SELECT FROM pg_trigger
			WHERE tgrelid = to_regclass(name) AND tgname = $2 AND tgenabled IN ('O', 'A'))), false)
		FROM unnest($1::text[]) name`, names, outbox.NotifyTrigger)
	if err != nil {
		return false, fmt.Errorf("look for the trigger %s: %w", outbox.NotifyTrigger, err)
	}
	return all, nil
}

// Listener is a connection that hears announcements. One goroutine uses it.
type Listener struct{ *DB }

// Listen begins to listen. What was committed before it returns may not have been
// heard.
//
// A listener that stops listening makes the server keep every notification, until
// there is no room and NOTIFY, and with it the producers' commits, fail. So it has
// to ask the server something every few seconds (Announced), or the server ends
// its session.
func Listen(ctx context.Context, cfg Config) (*Listener, error) {
	db, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	db.EndWithContext()
	// The first setting is for a client that does not even read.
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, fmt.Sprintf(`SET tcp_user_timeout = %d; LISTEN %s`,
			pg.SessionTimeout.Milliseconds(), outbox.NotifyChannel))
		return err
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	return &Listener{db}, nil
}

// Wait reports whether an announcement came in time.
func (l *Listener) Wait(ctx context.Context, patience time.Duration) (heard bool, err error) {
	err = l.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		waiting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		_, err := conn.WaitForNotification(waiting)
		heard = err == nil
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && !conn.IsClosed() {
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("wait for a notification: %w", err)
	}
	return heard, nil
}
