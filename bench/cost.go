package bench

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/sleep"
)

// Cost is what events have cost the database, from their INSERT to when they were gone.
type Cost struct {
	Name string `json:"name"`
	Rows int    `json:"rows"`
	// WAL is all of it, in bytes: of Insert, of Relay while the relay delivered, and of what took the rows
	// away.
	WAL    int64 `json:"wal"`
	Insert int64 `json:"wal_insert"`
	Relay  int64 `json:"wal_relay"`
	// CPU is PostgreSQL's time; 0 where it is not known.
	CPU time.Duration `json:"postgres_cpu"`
	// Dead are row versions that vacuum had to remove, and Size is that of the table and its indexes at the
	// end, in bytes.
	Dead int64 `json:"dead_rows"`
	Size int64 `json:"size"`
}

// costs measures each way to keep an outbox.
func (b *bench) costs(ctx context.Context) error {
	for _, mark := range b.Marks {
		set := Setting{URL: b.url, Mark: mark, Batch: b.Batches[len(b.Batches)-1], Of: 1}
		b.Say("what %d events cost with mark %s", b.CostRows, mark)
		c, err := b.cost(ctx, set)
		if err != nil {
			return fmt.Errorf("measure what events cost with mark %s: %w", mark, err)
		}
		b.report.Costs = append(b.report.Costs, *c)
	}
	return nil
}

// goneNames say what takes delivered rows away.
var goneNames = map[string]string{
	"delete":  "mark delete",
	"update":  "mark update, the archive, and its months dropped",
	"journal": "mark journal, partitions dropped",
}

func (b *bench) cost(ctx context.Context, set Setting) (*Cost, error) {
	if err := b.prepare(ctx, set, 0); err != nil {
		return nil, err
	}
	conn, err := b.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	c := &Cost{Name: goneNames[set.Mark], Rows: b.CostRows}
	deadBefore, err := deadRows(ctx, conn)
	if err != nil {
		return nil, err
	}
	u := b.usage()
	from, err := walEnd(ctx, conn)
	if err != nil {
		return nil, err
	}
	fill := fillSQL(set, b.CostRows, b.PerTx, b.Payload)
	if err := b.exec(ctx, unsynced, fill); err != nil {
		return nil, err
	}
	filled, err := walEnd(ctx, conn)
	if err != nil {
		return nil, err
	}
	if _, err := b.drain(ctx, set, b.CostRows); err != nil {
		return nil, err
	}
	drained, err := walEnd(ctx, conn)
	if err != nil {
		return nil, err
	}
	if err := b.takeAway(ctx, set); err != nil {
		return nil, err
	}
	end, err := walEnd(ctx, conn)
	if err != nil {
		return nil, err
	}
	c.CPU, _ = b.since(u)
	c.WAL, c.Insert, c.Relay = end-from, filled-from, drained-filled
	dead, err := deadRows(ctx, conn)
	if err != nil {
		return nil, err
	}
	c.Dead = dead - deadBefore
	return c, conn.QueryRow(ctx, `SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
		WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND starts_with(relname, $1)`,
		strings.TrimPrefix(set.table(), "public.")).Scan(&c.Size)
}

// deadRows is how many row versions have become garbage so far. Sessions tell their counts when they are
// idle.
func deadRows(ctx context.Context, conn *pgx.Conn) (n int64, err error) {
	sleep.For(ctx, 1500*time.Millisecond)
	if _, err = conn.Exec(ctx, `SELECT pg_stat_clear_snapshot()`); err != nil {
		return 0, err
	}
	err = conn.QueryRow(ctx, `SELECT coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint
		FROM pg_stat_user_tables WHERE schemaname = 'public' AND relname ~ '^outbox_'`).Scan(&n)
	return n, err
}

func walEnd(ctx context.Context, conn *pgx.Conn) (lsn int64, err error) {
	err = conn.QueryRow(ctx, `SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&lsn)
	return lsn, err
}

// takeAway does with the delivered rows what retention does, and what vacuum does then.
func (b *bench) takeAway(ctx context.Context, set Setting) error {
	switch set.Mark {
	case "update":
		if err := b.Retain(ctx, set, time.Millisecond); err != nil {
			return err
		}
		statements := append(truncate("outbox_messages_archive"), `VACUUM public.outbox_messages`)
		return b.exec(ctx, statements...)
	case "journal": // to drop a partition costs as much as to empty it
		statements := append(truncate("outbox_events"), `DELETE FROM public.outbox_journal`,
			`DELETE FROM public.outbox_known`)
		return b.exec(ctx, statements...)
	}
	return b.exec(ctx, `VACUUM public.outbox_messages`)
}

func (r *Report) printCosts(w io.Writer) error {
	fmt.Fprintf(w, "\nWhat an event costs the database from its INSERT to when it is gone, "+
		"%d rows of %d bytes:\n\n", r.Costs[0].Rows, r.Payload)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "WAL bytes\tof its INSERT\tof the relay\tPostgreSQL us\tdead rows\tMiB at the end\t ")
	for _, c := range r.Costs {
		per := func(n int64) float64 { return float64(n) / float64(c.Rows) }
		fmt.Fprintf(t, "%.0f\t%.0f\t%.1f\t%s\t%.2f\t%.1f\t %s\n", per(c.WAL), per(c.Insert), per(c.Relay),
			Known(1, per(c.CPU.Microseconds())), per(c.Dead), float64(c.Size)/(1<<20), c.Name)
	}
	return t.Flush()
}
