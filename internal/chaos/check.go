package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/outbox"
)

// settled waits until everything that is committed is marked, or dead, as long as
// there is less and less of it.
func (w *world) settled(ctx context.Context) (left int, err error) {
	least, since := -1, time.Now()
	for {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		err = w.query(try, `SELECT count(*)::int FROM outbox_messages WHERE processed_at IS NULL`, nil, &left)
		cancel()
		if err == nil && left == 0 {
			return 0, nil
		}
		if err == nil && (least < 0 || left < least) {
			least, since = left, time.Now()
		}
		if time.Since(since) > w.patience || !pause(ctx, 100*time.Millisecond) {
			return left, err
		}
	}
}

// check holds the stream against what the present primary says was committed, by an
// independent reading of both.
func (w *world) check(ctx context.Context, r *result) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	rows, err := readRows(ctx, conn)
	if err != nil {
		return err
	}
	var timeline uint32
	err = conn.QueryRow(ctx, `SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int FROM pg_control_system()`).Scan(&timeline)
	if err != nil {
		return err
	}
	if err := conn.QueryRow(ctx, `SELECT count(*)::int FROM outbox_messages_dlq`).Scan(&r.Dead); err != nil {
		return err
	}
	known := map[string]bool{}
	for i := range rows {
		known[fmt.Sprint(rows[i].Ref.Table, "/", rows[i].Ref.ID, "/", rows[i].Ref.Hash)] = true
	}
	var messages []audit.Message
	reader := &audit.Reader{JetStream: w.js, Stream: streamName, Source: w.source}
	err = reader.Read(ctx, func(m audit.Message) {
		// What only the lost primary had committed.
		if w.promoted.Load() && m.Own && m.Position.Timeline < timeline && !known[fmt.Sprint(m.ID.Table, "/", m.ID.ID, "/", m.ID.Hash)] {
			r.Phantoms++
			return
		}
		messages = append(messages, m)
	})
	if err != nil {
		return err
	}
	report := audit.Compare(rows, messages)
	r.Events, r.Lost, r.Duplicated, r.Reordered = len(rows), report.Lost.Count, report.Duplicated.Count, report.Reordered.Count
	r.Altered, r.Unknown = report.Altered.Count, report.Unknown.Count
	if !r.ok() {
		r.Details = report.String()
	}
	return nil
}

// readRows reads what is in the outbox and what was in it before it was truncated.
func readRows(ctx context.Context, conn *pgx.Conn) (all []audit.Row, err error) {
	t := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	for _, name := range []string{"history", "outbox_messages"} {
		from := *t
		from.Name = name
		// A delayed row stands alone.
		rows, err := audit.ReadTable(ctx, conn, &from, "coalesce((t.payload ->> 'n')::bigint, 0)")
		if err != nil {
			return nil, err
		}
		for i := range rows {
			rows[i].Ref.Table = t
		}
		all = append(all, rows...)
	}
	return all, nil
}
