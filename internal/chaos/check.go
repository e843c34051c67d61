package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// settled waits until everything that is committed is marked, or dead, as long as
// there is less and less of it.
func (w *world) settled(ctx context.Context) (left int, err error) {
	least, since := -1, time.Now()
	for {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		err = w.query(try, `SELECT count(*)::int FROM outbox_rows WHERE processed_at IS NULL`, nil, &left)
		cancel()
		if err == nil && left == 0 {
			return 0, nil
		}
		if err == nil && (least < 0 || left < least) {
			least, since = left, time.Now()
		}
		if time.Since(since) > w.patience || !sleep.For(ctx, 100*time.Millisecond) {
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
	if err := count(ctx, conn, r); err != nil {
		return err
	}
	timeline, left, err := w.leftAt(ctx, conn)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for i := range rows {
		known[key(rows[i].Ref.ID, rows[i].Ref.Hash)] = true
	}
	var messages []audit.Message
	phantoms := map[outbox.MessageID]bool{}
	replays := newReplayCounts()
	reader := w.reader()
	reader.Replayed = replays.add
	err = reader.Read(ctx, func(m audit.Message) {
		// What only the lost primary had committed.
		isOld := m.Own && m.Position.Timeline < timeline
		if isOld && !known[key(m.ID.ID, m.ID.Hash)] && w.mayBePhantom(m, left) && !phantoms[m.ID] {
			phantoms[m.ID] = true
			return
		}
		messages = append(messages, m)
	})
	if err != nil {
		return err
	}
	report := audit.Compare(rows, messages)
	r.Events, r.Lost = len(rows), report.Lost.Count
	r.Duplicated, r.Reordered = report.Duplicated.Count, report.Reordered.Count
	r.Altered, r.Unknown, r.Phantoms = report.Altered.Count, report.Unknown.Count, len(phantoms)
	if !w.rollback && !w.promoted.Load() { // else the positions start again
		r.Regressed = report.Regressed.Count
	}
	if r.sum() > 0 {
		r.Details = report.String()
	}
	return w.checkReplays(ctx, replays, r)
}

// count sees that every committed row still is somewhere: what is in no table any
// more, nobody would miss in the stream. Its own tables say how many there were.
func count(ctx context.Context, conn *pgx.Conn, r *result) error {
	return conn.QueryRow(ctx, `WITH everywhere AS (
			SELECT aggregate_type, aggregate_id, payload FROM outbox_rows
			UNION ALL SELECT aggregate_type, aggregate_id, payload FROM history
			UNION ALL SELECT aggregate_type, aggregate_id, payload FROM outbox_messages_dlq
		), counted AS (
			SELECT aggregate_id, count(*) AS rows,
				count(DISTINCT payload ->> 'n') AS numbers, max((payload ->> 'n')::bigint) AS last
			FROM everywhere WHERE aggregate_type = 'account' GROUP BY aggregate_id
		)
		SELECT (SELECT count(*)::int FROM numbers n LEFT JOIN counted c ON c.aggregate_id = n.aggregate
				WHERE (coalesce(rows, 0), coalesce(numbers, 0), coalesce(last, 0)) <> (n, n, n))
			+ (SELECT abs((SELECT coalesce(sum(n), 0) FROM reminders)
				- (SELECT count(*) FROM everywhere WHERE aggregate_type = 'reminder'))::int),
			(SELECT count(*)::int FROM outbox_messages_dlq WHERE event_type = 'account cursed'),
			(SELECT count(*)::int FROM outbox_messages_dlq WHERE event_type <> 'account cursed')`).
		Scan(&r.Vanished, &r.Dead, &r.Buried)
}

// leftAt is the present timeline, and up to where the one before is part of it.
func (w *world) leftAt(ctx context.Context, conn *pgx.Conn) (timeline uint32, left outbox.LSN, err error) {
	const timelineSQL = `SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int`
	if err := conn.QueryRow(ctx, timelineSQL).Scan(&timeline); err != nil || timeline == 1 {
		return timeline, 0, err
	}
	var history string
	file := fmt.Sprintf("pg_wal/%08X.history", timeline)
	if err := conn.QueryRow(ctx, `SELECT pg_read_file($1)`, file).Scan(&history); err != nil {
		return 0, 0, err
	}
	lines := strings.Split(strings.TrimSpace(history), "\n")
	fields := strings.Fields(lines[len(lines)-1])
	if len(fields) < 2 {
		return 0, 0, fmt.Errorf("read the timeline's history: %q", history)
	}
	left, err = outbox.ParseLSN(fields[1])
	return timeline, left, err
}

// mayBePhantom: its transaction was committed beyond what the promoted standby had.
// Where the walsender waits for the standby, only the table can have brought it.
func (w *world) mayBePhantom(m audit.Message, left outbox.LSN) bool {
	if m.Polled {
		return max(m.Position.Commit, m.Position.Passed) >= left
	}
	return m.Position.Commit >= left && !w.heldBack
}

// readRows reads what is in the outbox and what was in it before it was truncated.
func readRows(ctx context.Context, conn *pgx.Conn) (all []audit.Row, err error) {
	history := *outboxTable
	history.Name = "history"
	for _, from := range []*outbox.Table{&history, rowsTable} {
		// A delayed row stands alone.
		rows, err := audit.ReadTable(ctx, conn, from, "coalesce((t.payload ->> 'n')::bigint, 0)")
		if err != nil {
			return nil, err
		}
		for i := range rows {
			rows[i].Ref.Table = outboxTable
		}
		all = append(all, rows...)
	}
	return all, nil
}
