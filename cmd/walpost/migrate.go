package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func newMigrateCommand() *cobra.Command {
	return newGroup("migrate", "Create walpost's tables and publication", help("migrate"),
		migration("up", "Apply the migrations and create the publication",
			help("migrate up"), migrations.Latest, migrateUp),
		migration("down", "Take back the last migration, or those above --to N",
			help("migrate down"), migrations.OneStep, migrateDown),
		migration("status", "List the migrations and when they were applied",
			help("migrate status"), 0, migrateStatus),
		migration("print", "Write the migrations as plain SQL",
			help("migrate print"), migrations.Latest, migratePrint))
}

// migrateOptions are the flags of the subcommands.
type migrateOptions struct {
	to     int64
	given  bool // --to
	notify bool
	grant  string
	only   []migrations.Group // --only; none is every group
	// partition is --partition: "" or "month"
	partition string
}

// relay reports whether the outboxes and what belongs to them are meant.
func (o migrateOptions) relay() bool {
	return len(o.only) == 0 || slices.Contains(o.only, migrations.Relay)
}

// migration is one of the subcommands; they share the configuration and the flags. without is what the
// absence of --to means.
func migration(
	name, short, long string, without int64,
	do func(context.Context, io.Writer, *Config, migrateOptions) error,
) *cobra.Command {
	o := migrateOptions{to: without}
	var only string
	cmd := &cobra.Command{
		Use: name, Short: short, Long: long, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			o.given = cmd.Flags().Changed("to")
			if cmd.Flags().Changed("partition") && o.partition != "month" {
				return &usageError{hint.Errorf("`--partition month` is the one that there is",
					"partition the outboxes by %q", o.partition)}
			}
			if cmd.Flags().Changed("only") {
				if err := o.choose(only); err != nil {
					return &usageError{err}
				}
			}
			err = do(cmd.Context(), cmd.OutOrStdout(), cfg, o)
			if errors.Is(err, migrations.ErrNoVersion) {
				return &usageError{err}
			}
			return err
		},
	}
	if name != "status" {
		cmd.Flags().Int64Var(&o.to, "to", without, "up to, or down to, this version of the group in --only")
		// Not shown: the number that stands for its absence says nothing.
		cmd.Flags().Lookup("to").DefValue = "0"
		cmd.Flags().BoolVar(&o.notify, "notify-trigger", false, "the trigger that wakes a relay that polls")
	}
	if name == "up" {
		cmd.Flags().StringVar(&o.grant, "grant", "",
			"the relay's role, or with --only the application's, which is given what it needs on the tables")
		cmd.Flags().StringVar(&o.partition, "partition", "", "month: make partitioned tables of the outboxes")
	}
	cmd.Flags().StringVar(&only, "only", "", "one group of tables: relay, consumer or idempotency")
	addConfigFlags(cmd)
	return cmd
}

// choose is --only.
func (o *migrateOptions) choose(group string) error {
	g, err := migrations.ParseGroup(group)
	if err != nil {
		return err
	}
	o.only = []migrations.Group{g}
	flag := ""
	switch {
	case o.relay():
		return nil
	case o.notify:
		flag = "--notify-trigger"
	case o.partition != "":
		flag = "--partition"
	default:
		return nil
	}
	return hint.Errorf("leave out "+flag+", or run it in the outbox's database without --only",
		"combine --only %s and %s: that is for outboxes", g, flag)
}

func newRunner(cfg *Config, o migrateOptions) (*migrations.Runner, error) {
	tables, err := cfg.Tables()
	if err != nil {
		return nil, err
	}
	conn, err := migrationConn(cfg)
	if err != nil {
		return nil, err
	}
	r := migrations.New(conn, tables, o.only...)
	r.Own = cfg.Postgres.own(tables)
	return r, nil
}

func migrationConn(cfg *Config) (*pgx.ConnConfig, error) {
	conn, err := pg.Parse(cfg.Postgres.server())
	if err != nil {
		return nil, err
	}
	if conn.RuntimeParams["application_name"] == "" {
		conn.RuntimeParams["application_name"] = "walpost migrate"
	}
	return conn, nil
}

// checkOutboxes refuses outboxes whose tables lack columns of their layouts, or are missing.
func checkOutboxes(ctx context.Context, cfg *Config, o migrateOptions) error {
	if !o.relay() {
		return nil
	}
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	conn, err := table.Connect(ctx, database(cfg, "walpost migrate"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	if err := table.CheckColumns(ctx, conn, tables); err != nil {
		return err
	}
	return migrations.CheckOutboxes(ctx, conn, tables, cfg.Postgres.own(tables).Schema)
}

func migrateUp(ctx context.Context, w io.Writer, cfg *Config, o migrateOptions) (err error) {
	if err := checkOutboxes(ctx, cfg, o); err != nil {
		return err
	}
	r, err := newRunner(cfg, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	done, err := r.Up(ctx, o.to)
	for _, d := range done {
		fmt.Fprintf(w, "applied %s (%s)\n", d.Name, d.Duration.Round(time.Millisecond))
	}
	if err != nil {
		return err
	}
	if len(done) == 0 {
		fmt.Fprintln(w, "no migration to apply")
	}
	if o.partition != "" {
		tables, err := r.PartitionByMonth(ctx)
		for _, t := range tables {
			fmt.Fprintln(w, t)
		}
		if err == nil && len(tables) == 0 {
			fmt.Fprintln(w, "every outbox is partitioned by month")
		}
		if err != nil {
			return err
		}
	}
	if o.relay() && cfg.Mode != "poll" {
		if err := ensurePublication(ctx, w, cfg); err != nil {
			return err
		}
	}
	if o.grant != "" {
		if err := grant(ctx, w, cfg, o); err != nil {
			return err
		}
	}
	if !o.notify {
		return nil
	}
	tables, err := r.InstallNotify(ctx)
	for _, t := range tables {
		fmt.Fprintf(w, "created trigger %s on %s\n", outbox.NotifyTrigger, t)
	}
	if err == nil && len(tables) == 0 {
		fmt.Fprintf(w, "every outbox has the trigger %s\n", outbox.NotifyTrigger)
	}
	return err
}

// ensurePublication holds an advisory lock meanwhile: two CREATE PUBLICATION at the same time end in a unique
// violation.
func ensurePublication(ctx context.Context, w io.Writer, cfg *Config) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	connCfg, err := migrationConn(cfg)
	if err != nil {
		return err
	}
	// Adding a table to the publication waits for VACUUM, CREATE INDEX or ALTER TABLE on it. Inserts go on.
	connCfg.RuntimeParams["lock_timeout"] = "10s"
	conn, err := pg.ConnectConfig(ctx, connCfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it also gives the lock back
	const lock = `SELECT pg_advisory_lock(hashtextextended('walpost/publication/' || $1, 0))`
	if _, err := conn.Exec(ctx, lock, cfg.Postgres.Publication); err != nil {
		return fmt.Errorf("wait for another migrate: %w", err)
	}
	statement, err := stream.EnsurePublication(ctx, conn, cfg.Postgres.Publication, tables)
	if err != nil {
		return hint.Wrap(err, advisePublication(err))
	}
	if statement == "" {
		statement = fmt.Sprintf("publication %s is complete", cfg.Postgres.Publication)
	}
	fmt.Fprintln(w, statement)
	return nil
}

func advisePublication(err error) string {
	if pg.Code(err) == pgerrcode.UndefinedTable {
		return "check outboxes[].table: `walpost migrate up` creates public.outbox_messages " +
			"in the canonical layout and no other outbox"
	}
	return ""
}

func migrateDown(ctx context.Context, w io.Writer, cfg *Config, o migrateOptions) (err error) {
	r, err := newRunner(cfg, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if !o.notify || o.given {
		done, err := r.Down(ctx, o.to)
		for _, d := range done {
			fmt.Fprintf(w, "took back %s (%s)\n", d.Name, d.Duration.Round(time.Millisecond))
		}
		if err != nil {
			return err
		}
		if len(done) == 0 {
			fmt.Fprintln(w, "no migration to take back")
		}
	}
	if !o.relay() {
		return nil
	}
	tables, err := r.RemoveNotify(ctx)
	for _, t := range tables {
		fmt.Fprintf(w, "dropped trigger %s on %s\n", outbox.NotifyTrigger, t)
	}
	if err == nil && o.notify && len(tables) == 0 {
		fmt.Fprintf(w, "no table has the trigger %s\n", outbox.NotifyTrigger)
	}
	return err
}

func migrateStatus(ctx context.Context, w io.Writer, cfg *Config, o migrateOptions) (err error) {
	r, err := newRunner(cfg, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	states, err := r.Status(ctx)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "VERSION\tGROUP\tNAME\tAPPLIED AT")
	for _, s := range states {
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\n", s.Version, s.Group, s.Name, appliedAt(s))
	}
	return table.Flush()
}

func appliedAt(s migrations.State) string {
	if s.AppliedAt.IsZero() {
		return "pending"
	}
	return s.AppliedAt.Format(time.RFC3339)
}

func migratePrint(_ context.Context, w io.Writer, cfg *Config, o migrateOptions) error {
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	w = trusted(w) // an escaped name would be another one, and only the configuration's names are in it
	err = migrations.Print(w, o.to, cfg.Postgres.own(tables).Schema, tables, o.only...)
	if err != nil || !o.relay() {
		return err
	}
	_, err = fmt.Fprintf(w, "\n-- The publication that walpost reads. "+
		"It must exist before the replication slot.\n\n%s;\n",
		stream.EnsurePublicationSQL(cfg.Postgres.Publication, tables))
	if err == nil && o.notify {
		_, err = fmt.Fprintf(w, "\n-- The trigger that wakes a relay that polls.\n\n%s",
			migrations.NotifySQL(cfg.Postgres.own(tables).Schema, tables))
	}
	return err
}
