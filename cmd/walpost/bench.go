package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/walpost/walpost/bench"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func newBenchCommand() *cobra.Command {
	var b bench.Config
	var asJSON bool
	var window time.Duration
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure drain rate, latency and cost on your servers", Long: help("bench"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			if err := checkBench(&b, window); err != nil {
				return &usageError{err}
			}
			b.DuplicateWindow = func(batch string) time.Duration {
				if window > 0 {
					return window
				}
				return jetstream.DuplicateWindow(batch != string(jetstream.BatchSingle))
			}
			report, err := runBench(cmd.Context(), cfg, b, cmd.ErrOrStderr())
			if report != nil && report.HasFigures() {
				if perr := printBench(cmd.OutOrStdout(), report, asJSON); err == nil {
					err = perr
				}
			}
			return err
		},
	}
	f := cmd.Flags()
	f.IntVar(&b.Rows, "rows", 500_000, "rows of each drain")
	f.IntVar(&b.PerTx, "per-transaction", 100, "rows in each transaction")
	f.IntVar(&b.Payload, "payload", 300, "bytes of each payload, 32 at least")
	f.StringSliceVar(&b.Marks, "marks", []string{"delete", "update", "journal"},
		"what the relay does with delivered rows, one drain for each")
	f.StringSliceVar(&b.Batches, "batches", []string{"single", "fast"},
		"how messages are handed over, one drain for each: single, fast, atomic; latency with the last")
	f.IntSliceVar(&b.Shards, "shards", []int{1}, "numbers of relays that share the rows, one drain for each")
	f.DurationVar(&window, "duplicate-window", 0,
		"that of the streams; 0 is as walpost makes them, 100ms with batches and 5s without")
	f.BoolVar(&b.Binary, "binary", false, "measure what the server sends with binary tuples, too")
	f.IntVar(&b.Replicas, "replicas", 1, "replicas of the stream")
	f.IntVar(&b.Runs, "runs", 3, "how often each drain is measured; 0 measures none")
	f.IntVar(&b.CostRows, "cost", 100_000,
		"rows for which it is measured what an event costs the database, with each mark; 0 measures nothing")
	f.IntVar(&b.Retained, "retained", 0, "rows over which it is measured how large the outbox is, "+
		"with each mark, while rows go a minute after they were delivered; 0 measures nothing")
	f.IntSliceVar(&b.Rates, "latency", []int{100, 1000, 5000},
		"commits a second at which latency is measured, with each mark; 0 measures none")
	f.IntVar(&b.Producers, "producers", 8,
		"sessions for which it is measured what a relay costs them, with each mark; 0 measures nothing")
	f.DurationVar(&b.For, "for", 10*time.Second, "how long latency is measured at each rate, and producers")
	f.BoolVar(&asJSON, "json", false, "print every run as JSON")
	addConfigFlags(cmd)
	return cmd
}

func checkBench(b *bench.Config, window time.Duration) error {
	switch {
	case window != 0 && window < 100*time.Millisecond:
		return fmt.Errorf("--duplicate-window is 100ms or more, which is JetStream's least")
	case b.Rows < 1 || b.PerTx < 1 || b.Replicas < 1 || b.Runs < 0 || b.Payload < 32:
		return fmt.Errorf("--rows, --per-transaction and --replicas are 1 or more, " +
			"--payload is 32 or more, --runs is not negative")
	case b.CostRows < 0 || b.Producers < 0 || b.Retained < 0:
		return fmt.Errorf("--cost, --producers and --retained are not negative")
	case b.For < time.Second:
		return fmt.Errorf("--for is 1s or more")
	}
	for _, m := range b.Marks {
		if !outbox.Mark(m).Valid() {
			return fmt.Errorf("--marks: %q is none of delete, update and journal", m)
		}
	}
	for _, x := range b.Batches {
		if x != string(jetstream.BatchSingle) && x != string(jetstream.BatchFast) &&
			x != string(jetstream.BatchAtomic) {
			return fmt.Errorf("--batches: %q is none of single, fast and atomic", x)
		}
	}
	if len(b.Marks) == 0 || len(b.Batches) == 0 || len(b.Shards) == 0 {
		return fmt.Errorf("--marks, --batches and --shards name one at least")
	}
	for _, n := range b.Shards {
		if n < 1 || n > outbox.MaxShards {
			return fmt.Errorf("--shards: %d is not 1 to %d", n, outbox.MaxShards)
		}
	}
	var rates []int
	for _, r := range b.Rates {
		if r < 0 {
			return fmt.Errorf("--latency: %d is no rate", r)
		}
		if r > 0 {
			rates = append(rates, r)
		}
	}
	b.Rates = rates
	return nil
}

func runBench(ctx context.Context, cfg *Config, b bench.Config, stderr io.Writer) (*bench.Report, error) {
	nc, err := jetstream.Connect(ctx, natsConn(cfg))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	if b.PostgresURL, err = cfg.Postgres.server().ReadURL(); err != nil {
		return nil, err
	}
	b.PostgresFiles.Password = cfg.Postgres.PasswordFile
	b.NATS, b.Domain = nc, cfg.NATS.Domain
	b.Say = func(format string, args ...any) {
		fmt.Fprintf(stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
	}
	b.Migrate = func(ctx context.Context, url string) error {
		for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} { // each has its table
			set := bench.Setting{URL: url, Mark: string(mark), Batch: string(jetstream.BatchSingle)}
			c := benchConfig(cfg, set)
			if err := migrateUp(ctx, io.Discard, c, migrateOptions{to: migrations.Latest}); err != nil {
				return err
			}
		}
		return nil
	}
	b.Fit = func(set bench.Setting) ([]string, error) {
		tables, err := benchConfig(cfg, set).Tables()
		if err != nil {
			return nil, err
		}
		return []string{stream.PublicationSQL(set.Slot(), tables)}, nil
	}
	b.Retain = func(ctx context.Context, set bench.Setting, after time.Duration) error {
		c := benchConfig(cfg, set)
		c.Retention.ArchiveAfter, c.Retention.DeleteAfter, c.Retention.DropAfter = after, after, 0
		_, err := retain(ctx, c, io.Discard)
		return err
	}
	b.Command = func(set bench.Setting) (*exec.Cmd, error) {
		program, err := os.Executable()
		if err != nil {
			return nil, err
		}
		// A walpost.yaml may list other outboxes.
		c := exec.CommandContext(ctx, program, "run", "--config", os.DevNull)
		c.Env = os.Environ()
		for _, k := range benchConfig(cfg, set).keys() {
			if k.env != "" {
				c.Env = append(c.Env, k.env+"="+k.String())
			}
		}
		return c, nil
	}
	b.Relay = func(ctx context.Context, set bench.Setting, onStored func(time.Duration)) error {
		r, err := newRelay(benchConfig(cfg, set), zap.NewNop(), prometheus.NewRegistry(),
			hooks{onStored: onStored})
		if err != nil {
			return err
		}
		return r.Run(ctx)
	}
	b.Publish = func(ctx context.Context, set bench.Setting, eventType, payload string, n, perTx int) error {
		return publishAlone(ctx, nc, benchConfig(cfg, set), eventType, payload, n, perTx)
	}
	return bench.Run(ctx, b)
}

// benchConfig is the configuration with the benchmark's database and stream.
func benchConfig(cfg *Config, set bench.Setting) *Config {
	c := *cfg
	c.Publish.Batch = set.Batch
	c.Postgres.URLFile = "" // its URL has another database now
	c.Postgres.URL, c.Postgres.MaxRetainedWAL = set.URL, 0
	c.Postgres.Slot, c.Postgres.Publication = set.Slot(), set.Slot()
	c.Source, c.Shard = "", set.Shard()
	c.Outboxes = []OutboxConfig{defaultOutbox()}
	c.Outboxes[0].Mark = MarkConfig{Name: set.Mark}
	if set.Mark == string(outbox.MarkJournal) {
		c.Outboxes[0].Table, c.Outboxes[0].Layout.Name = "public."+outbox.AppendTable, outbox.Append().Name
	}
	c.NATS.Stream, c.NATS.Subject, c.NATS.CreateStream = set.Stream(), set.Subject(), false
	c.Mode = "auto"
	c.Retention.Interval = 0
	c.HTTP.Listen = ""
	c.Log.Level = "warn"
	return &c
}

func printBench(w io.Writer, r *bench.Report, asJSON bool) error {
	if !asJSON {
		return r.Print(w)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
