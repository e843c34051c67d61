// Command benchcheck counts what the relay allocates for a row on its way from one socket
// to the other, and fails where that is more than the figures that are committed. Seconds
// say little on a machine that does something else besides; allocations are the same on
// every one.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

const (
	warm    = 20_000 // rows, not counted
	counted = 60_000
	// slack is how much more a row may cost than the figure says: reads and batches are of
	// different sizes each time. Whatever else the machine does only adds, so the least of
	// some tries counts.
	slackAllocs = 0.2
	slackBytes  = 64
	tries       = 8
)

// figures are what a row may cost, by case.
//
//go:embed figures.json
var figuresJSON []byte

type cost struct {
	Allocs float64 `json:"allocs"` // for each row
	Bytes  float64 `json:"bytes"`
}

func (c cost) within(limit cost) bool {
	return c.Allocs <= limit.Allocs+slackAllocs && c.Bytes <= 1.25*limit.Bytes+slackBytes
}

func main() { testenv.Command(run) }

func run(ctx context.Context) error {
	write := flag.Bool("write", false, "write the figures again, from the checkout's root")
	flag.Parse()
	committed := map[string]cost{}
	if err := json.Unmarshal(figuresJSON, &committed); err != nil {
		return err
	}
	pg, err := testenv.StartPostgres(ctx, testenv.PGOptions{})
	if err != nil {
		return err
	}
	defer pg.Close()
	n, err := testenv.StartNATS(ctx, testenv.NATSOptions{Process: true})
	if err != nil {
		return err
	}
	defer n.Close()
	got := map[string]cost{}
	for at, c := range cases() {
		name := c.name()
		for try := range tries {
			database := fmt.Sprintf("check_%d_%d", at, try)
			if err := pg.Exec(ctx, "postgres", "CREATE DATABASE "+database); err != nil {
				return err
			}
			now, err := c.measure(ctx, pg.URL(database), n.URL(), database)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if least, found := got[name]; found {
				now = cost{min(now.Allocs, least.Allocs), min(now.Bytes, least.Bytes)}
			}
			got[name] = now
			if !*write && now.within(committed[name]) {
				break
			}
		}
	}
	if *write {
		text, err := json.MarshalIndent(got, "", "\t")
		if err != nil {
			return err
		}
		file := filepath.Join("internal", "benchcheck", "figures.json")
		return os.WriteFile(file, append(text, '\n'), 0o644)
	}
	return compare(got, committed)
}

// counting is one way to relay a row.
type counting struct {
	batch jetstream.Batching
	trace float64 // the part of the rows that is traced
}

func cases() (all []counting) {
	for _, batch := range []jetstream.Batching{
		jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic,
	} {
		all = append(all, counting{batch: batch})
	}
	return append(all, counting{batch: jetstream.BatchFast, trace: 0.01})
}

func (c counting) name() string {
	name := string(c.batch)
	if c.trace > 0 {
		name += fmt.Sprintf(", %g %% traced", 100*c.trace)
	}
	return name
}

func compare(got, committed map[string]cost) error {
	var failed error
	fmt.Printf("%-32s %12s %10s %12s %10s\n",
		"for each row", "allocations", "committed", "bytes", "committed")
	for _, name := range slices.Sorted(maps.Keys(got)) {
		g, c := got[name], committed[name]
		fmt.Printf("%-32s %12.2f %10.2f %12.0f %10.0f\n", name, g.Allocs, c.Allocs, g.Bytes, c.Bytes)
		if !g.within(c) {
			failed = errors.Join(failed, fmt.Errorf("%s: a row costs more than it did", name))
		}
		if c.Allocs > g.Allocs+1 {
			failed = errors.Join(failed, fmt.Errorf("%s: a row costs less than it did", name))
		}
	}
	if failed != nil {
		return fmt.Errorf("%w; where that is wanted, write the figures again: "+
			"go run ./internal/benchcheck -write", failed)
	}
	return nil
}

// measure has a relay drain a backlog, and counts between two of its rows.
func (of counting) measure(ctx context.Context, url, broker, name string) (c cost, err error) {
	batch := of.batch
	nc, err := nats.Connect(broker)
	if err != nil {
		return c, err
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return c, err
	}
	if _, err := js.CreateStream(ctx, natsjs.StreamConfig{
		Name: name, Subjects: []string{name + ".>"}, Duplicates: time.Minute, AllowDirect: true,
		AllowBatchPublish: batch == jetstream.BatchFast, AllowAtomicPublish: batch == jetstream.BatchAtomic,
	}); err != nil {
		return c, err
	}
	table := &outbox.Table{
		Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return c, err
	}
	defer conn.Close(ctx)
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return c, err
	}
	m := migrations.New(cfg, []*outbox.Table{table})
	defer m.Close()
	if _, err := m.Up(ctx, migrations.Latest); err != nil {
		return c, err
	}

	stored := -1 // the first session's row
	var before, after runtime.MemStats
	begun, drained := make(chan struct{}), make(chan struct{})
	config := relay.Config{
		PostgresURL: url, Slot: name, Publication: name, Outboxes: []*outbox.Table{table},
		NATS:   jetstream.ConnConfig{URL: broker},
		Stream: jetstream.StreamConfig{Name: name, Batching: batch, AcceptWeak: true},
		Tracer: sdktrace.NewTracerProvider().Tracer("benchcheck"), TraceRatio: of.trace,
		Subject: name + ".{event_type}", Window: 4096, WindowBytes: 32 << 20, DelayThreshold: time.Second,
		// On the goroutine that gets the PubAcks, one after the other.
		OnStored: func(time.Duration) {
			switch stored++; stored {
			case 0:
				close(begun)
			case warm:
				runtime.ReadMemStats(&before)
			case warm + counted:
				runtime.ReadMemStats(&after)
				close(drained)
			}
		},
	}
	fill := func(rows int) error {
		_, err := conn.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d BY 100 LOOP
			INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT 1, 'account', i, 'account.moved', jsonb_build_object('n', n, 'pad', repeat('x', 270))
				FROM generate_series(1, least(%[1]d, 100)) n;
			COMMIT; END LOOP; END $$`, rows))
		return err
	}
	// The first session makes the slot and stores a row, the second one finds a backlog, as
	// after an outage.
	if err := session(ctx, config, func() error { return fill(1) }, begun); err != nil {
		return c, err
	}
	if err := fill(warm + counted + 20_000); err != nil {
		return c, err
	}
	if err := session(ctx, config, func() error { return nil }, drained); err != nil {
		return c, err
	}
	_, err = conn.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, name)
	allocs := float64(after.Mallocs-before.Mallocs) / counted
	bytes := float64(after.TotalAlloc-before.TotalAlloc) / counted
	return cost{math.Round(100*allocs) / 100, math.Round(bytes)}, err
}

// session runs a relay, does something when it streams, and stops it when until is closed.
func session(ctx context.Context, config relay.Config, streaming func() error, until <-chan struct{}) error {
	r, err := relay.New(config, zap.NewNop(), prometheus.NewRegistry())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	for r.Status().State != "streaming" {
		select {
		case err := <-ended:
			return errors.Join(errors.New("the relay has ended too early"), err, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := streaming(); err != nil {
		return err
	}
	select {
	case err := <-ended:
		return errors.Join(errors.New("the relay has ended too early"), err, ctx.Err())
	case <-until:
		cancel()
		return <-ended
	}
}
