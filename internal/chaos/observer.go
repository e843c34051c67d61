package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// observer looks, while all goes on, for what is wrong at a moment and put right
// later: a confirmed LSN that has passed a row which is not settled, and a row that
// is marked and not in the stream.
type observer struct {
	w      *world
	stream *audit.Reader
	stored map[string]uint64 // the newest message of each key, by sequence
	early  []sight
	losses int64        // rollbacks of the store before the stream was read
	since  time.Time    // of the marks that were not looked at yet
	afresh bool         // since the promotion
	judged atomic.Int64 // confirmed LSNs, with rows on their way
	looks  atomic.Int64 // at the marks
	found  []string
	stop   context.CancelFunc
	done   chan struct{}
}

// sight is the rows that were visible and pending, and an LSN behind all of their
// commits.
type sight struct {
	rows map[string]bool
	end  outbox.LSN
}

// observe begins to look.
func (w *world) observe(ctx context.Context, seed uint64) *observer {
	ctx, stop := context.WithCancel(ctx)
	o := &observer{w: w, stored: map[string]uint64{}, stop: stop, done: make(chan struct{})}
	o.stream = o.reader()
	go o.run(ctx, rand.New(rand.NewPCG(seed, 3)))
	return o
}

func (o *observer) reader() *audit.Reader {
	return o.w.reader()
}

func (o *observer) run(ctx context.Context, rng *rand.Rand) {
	defer close(o.done)
	for sleep.For(ctx, between(rng, 20*time.Millisecond, 600*time.Millisecond)) {
		look, cancel := context.WithTimeout(ctx, 10*time.Second)
		_ = o.look(look, o.w.promoted.Load())
		cancel()
	}
}

// finish ends it and tells what was found.
func (o *observer) finish(r *result) {
	o.stop()
	<-o.done
	r.Moments = o.found
	o.tell(r)
	o.w.log("observer: %d looks at the marks, %d at confirmed LSNs", r.Looks, r.Judged)
}

// tell says how much was seen so far.
func (o *observer) tell(r *result) { r.Looks, r.Judged = int(o.looks.Load()), int(o.judged.Load()) }

// say keeps the first few.
func (o *observer) say(format string, args ...any) {
	if what := fmt.Sprintf(format, args...); len(o.found) < 3 && !slices.Contains(o.found, what) {
		o.found = append(o.found, what)
	}
}

// look fails where a server is away.
func (o *observer) look(ctx context.Context, promoted bool) error {
	conn, err := o.w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	if promoted && !o.afresh {
		o.afresh, o.early, o.since = true, nil, time.Time{} // another server's LSNs
	}
	// The order matters: what is confirmed now has been settled before.
	var confirmed *string
	err = conn.QueryRow(ctx, `SELECT (
		SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1)`, slotName).
		Scan(&confirmed)
	if err != nil {
		return err
	}
	now, err := o.pending(ctx, conn)
	if err != nil {
		return err
	}
	if promoted != o.w.promoted.Load() {
		return nil
	}
	if confirmed != nil {
		lsn, err := outbox.ParseLSN(*confirmed)
		if err != nil {
			return err
		}
		o.judge(lsn, now)
	}
	if len(now.rows) > 0 {
		o.early = append(o.early, now)
	}
	return o.marked(ctx, conn)
}

// pending reads the rows that are to be delivered now: a delayed one, or one that is
// recorded, is the table's and not the WAL's.
func (o *observer) pending(ctx context.Context, conn *pgx.Conn) (s sight, err error) {
	// A row that is made pending again is another one.
	rows, err := conn.Query(ctx, `SELECT id || '/' || version FROM outbox_rows
		WHERE processed_at IS NULL AND last_error IS NULL AND aggregate_type <> 'reminder'`)
	if err != nil {
		return s, err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return s, err
	}
	s.rows = map[string]bool{}
	for _, id := range ids {
		s.rows[id] = true
	}
	var end string
	if err := conn.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&end); err != nil {
		return s, err
	}
	s.end, err = outbox.ParseLSN(end)
	return s, err
}

func (o *observer) judge(confirmed outbox.LSN, now sight) {
	var later []sight
	for _, s := range o.early {
		if s.end > confirmed {
			later = append(later, s)
			continue
		}
		o.judged.Add(1)
		for id := range s.rows {
			if now.rows[id] {
				o.say("row %s was committed below %s, is neither marked nor recorded, and %s is confirmed",
					id, s.end, confirmed)
			}
		}
	}
	o.early = later[max(0, len(later)-100):]
}

// marked looks for rows that are marked and not in the stream.
func (o *observer) marked(ctx context.Context, conn *pgx.Conn) error {
	losses := o.w.losses.Load()
	if o.w.lossy.Load() || losses != o.losses { // they may be, until the relay notices
		o.stream, o.stored, o.since, o.losses = o.reader(), map[string]uint64{}, time.Time{}, losses
		return nil
	}
	o.w.deleting.RLock()
	defer o.w.deleting.RUnlock()
	result, err := conn.Query(ctx, fmt.Sprintf(`SELECT id::text, %s, processed_at FROM outbox_rows t
		WHERE processed_at >= $1`, outboxTable.HashSQL("t")), o.since.Add(-5*time.Second))
	if err != nil {
		return err
	}
	var rows []string
	var id string
	var hash int64
	var at time.Time
	newest := o.since
	_, err = pgx.ForEachRow(result, []any{&id, &hash, &at}, func() error {
		rows = append(rows, key(id, uint64(hash)))
		if at.After(newest) {
			newest = at
		}
		return nil
	})
	if err != nil {
		return err
	}
	missing := func(row string) bool { return o.stored[row] <= o.w.deleted[row] }
	stored := func(m audit.Message) { o.stored[key(m.ID.ID, m.ID.Hash)] = m.Seq }
	for try := 0; try == 0 || try < 3 && o.w.cluster != nil && slices.ContainsFunc(rows, missing); try++ {
		if try > 0 && !sleep.For(ctx, 200*time.Millisecond) { // a leader that was deposed may not know it yet
			return ctx.Err()
		}
		if err := o.stream.Read(ctx, stored); err != nil {
			return err
		}
	}
	if o.w.losses.Load() != losses {
		return nil
	}
	for _, row := range rows {
		if missing(row) {
			o.say("row %s is marked, and its message is not in the stream", row)
		}
	}
	o.since = newest
	o.looks.Add(1)
	return nil
}

// key tells a row and its message from others of the one table.
func key(id string, hash uint64) string { return fmt.Sprint(id, "/", hash) }

var alarmInLog = regexp.MustCompile(`"alarm": ?"([a-z_]+)"`)

// countAlarms reads the relays' logs.
func (w *world) countAlarms() (map[string]int, error) {
	alarms := map[string]int{}
	for _, r := range w.relays {
		text, err := os.ReadFile(r.log)
		if err != nil {
			return nil, err
		}
		for _, m := range alarmInLog.FindAllSubmatch(text, -1) {
			alarms[string(m[1])]++
		}
		for _, fault := range []string{"panic: ", "fatal error: "} {
			alarms[fault] += bytes.Count(text, []byte(fault))
		}
		if r.stuck.Load() {
			alarms["did not stop"]++
		}
	}
	return alarms, nil
}
