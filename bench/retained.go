package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/sleep"
)

// Retained is how large an outbox is while events are written, delivered, and taken away by retention.
type Retained struct {
	Mark string `json:"mark"`
	Rows int    `json:"rows"`
	// After is how long after it was processed a row goes.
	After time.Duration `json:"after"`
	// Took is for all of them.
	Took  time.Duration `json:"took"`
	Sizes []Size        `json:"sizes"`
	// Vacuums are those of the outbox, and Dead the row versions that it had to remove.
	Vacuums int64 `json:"vacuums"`
	Dead    int64 `json:"dead_rows"`
}

// Size is that of an outbox after so many rows, with its indexes, in bytes.
type Size struct {
	Rows    int   `json:"rows"`
	Outbox  int64 `json:"outbox"`
	Journal int64 `json:"journal,omitempty"`
}

const (
	retainedAfter = time.Minute
	retainEvery   = 5 * time.Second
	// writtenAhead is how many rows may wait for the relay.
	writtenAhead = 200_000
	// retainedSizes is how often the size is looked at.
	retainedSizes = 40
	// storedLeast is how many messages stay in the stream: its disk is not what is measured.
	storedLeast = 100_000
)

// retained writes rows for each mark.
func (b *bench) retained(ctx context.Context) error {
	for _, mark := range b.Marks {
		set := Setting{URL: b.url, Mark: mark, Batch: b.Batches[len(b.Batches)-1], Of: 1}
		b.Say("how large the outbox is over %d events, mark %s", b.Retained, mark)
		r, err := b.retain(ctx, set)
		if err != nil {
			return fmt.Errorf("measure the size of the outbox with mark %s: %w", mark, err)
		}
		b.report.Retained = append(b.report.Retained, r)
	}
	return nil
}

func (b *bench) retain(ctx context.Context, set Setting) (*Retained, error) {
	if err := b.prepare(ctx, set, 0); err != nil {
		return nil, err
	}
	conn, err := b.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	cmd, err := b.Command(set)
	if err != nil {
		return nil, err
	}
	relay, err := start(cmd)
	if err != nil {
		return nil, err
	}
	defer relay.kill()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	retaining := make(chan error, 1)
	go func() {
		for sleep.For(ctx, retainEvery) {
			if err := b.Retain(ctx, set, retainedAfter); err != nil && ctx.Err() == nil {
				retaining <- err
				stop(err)
				return
			}
		}
		retaining <- nil
	}()
	r := &Retained{Mark: set.Mark, Rows: b.Retained, After: retainedAfter}
	counts := vacuums{set: set, of: map[uint32][2]int64{}}
	begun := time.Now()
	for written, looked := 0, 0; written < b.Retained; {
		n := min(writtenAhead/2, b.Retained-written)
		if err := b.exec(ctx, unsynced, fillSQL(set, n, b.PerTx, b.Payload)); err != nil {
			return nil, errors.Join(err, context.Cause(ctx)) // that of a pass of retention
		}
		written += n
		if err := b.awaitStored(ctx, set, written-writtenAhead, relay.ended); err != nil {
			return nil, fmt.Errorf("%w\n%s", errors.Join(err, context.Cause(ctx)), relay.said())
		}
		if err := counts.read(ctx, conn); err != nil {
			return nil, err
		}
		if at := written * retainedSizes / b.Retained; at > looked {
			looked = at
			size := Size{Rows: written}
			if err := conn.QueryRow(ctx, sizeSQL, set.table()).
				Scan(&size.Outbox, &size.Journal); err != nil {
				return nil, err
			}
			r.Sizes = append(r.Sizes, size)
		}
	}
	if err := b.awaitStored(ctx, set, b.Retained, relay.ended); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, relay.said())
	}
	r.Took = time.Since(begun)
	r.Vacuums, r.Dead = counts.sum()
	stop(nil)
	if err := <-retaining; err != nil {
		return nil, err
	}
	if err := relay.stop(); err != nil {
		return nil, fmt.Errorf("stop the relay: %w\n%s", err, relay.said())
	}
	return r, nil
}

// sizeSQL is how large outbox $1 is, and how large the journal is.
const sizeSQL = `SELECT sum(pg_total_relation_size(t.relid))::bigint,
		pg_total_relation_size('public.outbox_journal') + pg_total_relation_size('public.outbox_deferred')
			+ pg_total_relation_size('public.outbox_known')
	FROM (` + partsSQL + `) t`

// partsSQL are outbox $1 and its partitions.
const partsSQL = `SELECT to_regclass($1)::oid AS relid
	UNION SELECT relid FROM pg_partition_tree(to_regclass($1))`

// awaitStored waits until the stream has had so many messages since the one that prepare has sent, and drops
// old ones.
func (b *bench) awaitStored(ctx context.Context, set Setting, rows int, ended func() error) error {
	s, err := b.js.Stream(ctx, set.Stream())
	if err != nil {
		return err
	}
	for last, begun := uint64(0), time.Now(); ; {
		info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		if info.State.Msgs > 2*storedLeast {
			if err := s.Purge(ctx, jetstream.WithPurgeKeep(storedLeast)); err != nil {
				return err
			}
		}
		if int(info.State.LastSeq) > rows {
			return nil
		}
		if info.State.LastSeq > last {
			last, begun = info.State.LastSeq, time.Now()
		}
		if err := ended(); err != nil {
			return fmt.Errorf("the relay has ended: %w", err)
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the relay has stored %d of %d rows, and none for %s", last, rows, patience)
		}
		if !sleep.For(ctx, 20*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
}

// vacuums are what the server has counted of each table of an outbox, also of those that are dropped by now.
type vacuums struct {
	set Setting
	of  map[uint32][2]int64
}

func (v *vacuums) read(ctx context.Context, conn *pgx.Conn) error {
	rows, _ := conn.Query(ctx, `SELECT s.relid, s.vacuum_count + s.autovacuum_count, s.n_tup_upd + s.n_tup_del
		FROM (`+partsSQL+`) t JOIN pg_stat_user_tables s ON s.relid = t.relid`,
		v.set.table())
	var id uint32
	var counts [2]int64
	_, err := pgx.ForEachRow(rows, []any{&id, &counts[0], &counts[1]}, func() error {
		v.of[id] = counts
		return nil
	})
	return err
}

func (v *vacuums) sum() (vacuums, dead int64) {
	for _, n := range v.of {
		vacuums, dead = vacuums+n[0], dead+n[1]
	}
	return vacuums, dead
}

func (r *Report) printRetained(w io.Writer) error {
	for _, x := range r.Retained {
		fmt.Fprintf(w, "\nThe outbox over %d events in %s, mark %s, "+
			"where rows go %s after they were processed: %d vacuums, %d dead row versions\n\n",
			x.Rows, x.Took.Round(time.Second), x.Mark, x.After, x.Vacuums, x.Dead)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "million events\tMiB\tof the journal\t ")
		for i, s := range x.Sizes {
			if (i+1)%4 == 0 {
				fmt.Fprintf(t, "%.1f\t%.0f\t%.1f\t \n",
					float64(s.Rows)/1e6, float64(s.Outbox)/(1<<20), float64(s.Journal)/(1<<20))
			}
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}
