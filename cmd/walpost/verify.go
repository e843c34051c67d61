package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/stream"
	"github.com/walpost/walpost/verify"
)

func newVerifyCommand() *cobra.Command {
	var since string
	var repair, asJSON bool
	cmd := &cobra.Command{
		Use: "verify", Short: "Compare the outboxes with the stream", Long: help("verify"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var window time.Duration
			if err := age(&window, "since", since); err != nil {
				return err
			}
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			var from time.Time
			if window > 0 {
				from = time.Now().Add(-window)
			}
			report, err := runVerify(cmd, cfg, from, repair)
			return tellVerify(cmd.OutOrStdout(), report, err, repair, asJSON)
		},
	}
	cmd.Flags().StringVar(&since, "since", "",
		"only what was stored and marked so long ago or later, as in 90m or 72h")
	cmd.Flags().BoolVar(&repair, "repair", false, "make missing rows pending again")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

// tellVerify prints the report, also that of a comparison that broke off: rows may have been repaired. Its
// error distinguishes findings from failures.
func tellVerify(w io.Writer, report *verify.Report, broken error, repair, asJSON bool) error {
	if report == nil {
		return broken
	}
	if err := printVerify(w, report, asJSON); err != nil {
		return errors.Join(broken, err)
	}
	if broken != nil {
		if pg.Code(broken) == pgerrcode.InsufficientPrivilege && hint.Of(broken) == "" {
			broken = hint.Wrap(broken, "as the table's owner, "+
				"GRANT the role of postgres.url what `walpost verify --help` names")
		}
		return fmt.Errorf("the comparison broke off, and the report is incomplete: %w", broken)
	}
	if n := report.Faults(); n > 0 {
		return adviseFaults(report, n, repair)
	}
	if asJSON {
		return nil
	}
	_, err := fmt.Fprintln(w, "no fault was found: nothing is missing, duplicated or reordered")
	return err
}

func adviseFaults(r *verify.Report, n int64, repaired bool) error {
	err := fmt.Errorf("%d faults were found", n)
	if n == 1 {
		err = errors.New("a fault was found")
	}
	if r.Found[verify.Missing].Count > 0 && !repaired {
		return hint.Wrap(err, "`walpost verify --repair` publishes what is missing; "+
			"if the stream was begun empty on purpose, compare its own time only: --since 1h")
	}
	return err
}

func runVerify(cmd *cobra.Command, cfg *Config, since time.Time, repair bool) (*verify.Report, error) {
	ctx := cmd.Context()
	tables, err := cfg.Tables()
	if err != nil {
		return nil, err
	}
	db := database(cfg, "walpost verify")
	if err := table.CheckDirect(ctx, db); err != nil {
		return nil, err
	}
	source, phantom, unknown, err := identifySource(ctx, cfg, db)
	if err != nil {
		return nil, err
	}
	s, _, closeNATS, err := openStream(ctx, cfg, "walpost verify")
	if err != nil {
		return nil, err
	}
	defer closeNATS()
	report, err := verify.Run(ctx, verify.Config{
		Postgres: db, Slot: cfg.Postgres.Slot, Outboxes: tables, Stream: s, Source: source, Phantom: phantom,
		Since: since, KeptFor: keptFor(cfg), Repair: repair,
		Skip:             fallback.OnPoison(cfg.Fallback.OnPoison) == fallback.Skip,
		DelayThreshold:   cfg.Fallback.DelayThreshold,
		FallbackInterval: cfg.Fallback.Interval,
		Progress:         progressBar(cmd.ErrOrStderr()),
		Own: relay.Form{
			Source: source, Stream: s.Name(), Domain: s.Domain(),
			Subject: cfg.NATS.Subject, Format: publish.Format(cfg.NATS.Format),
		}.Own,
	})
	if report != nil && unknown != "" {
		report.Notes = append(report.Notes, unknown)
	}
	return report, err
}

// keptFor is how long a delivered row of a table is to be found.
func keptFor(cfg *Config) func(*outbox.Table) time.Duration {
	return func(t *outbox.Table) time.Duration {
		switch {
		case !table.IsArchived(t):
			return cfg.Retention.DeleteAfter
		case cfg.Retention.ArchiveAfter == 0:
			return 0
		}
		return cfg.Retention.DropAfter
	}
}

// identifySource finds the relay's source and the history of the server's timelines, which takes a
// replication connection. Where that connection fails, unknown says so.
func identifySource(ctx context.Context, cfg *Config, config table.Config) (
	source string, phantom func(outbox.Position) bool, unknown string, err error,
) {
	db, err := table.Open(ctx, config)
	if err != nil {
		return "", nil, "", err
	}
	defer db.Close()
	var sys stream.System
	slots, err := stream.OpenSlots(ctx, cfg.Postgres.server())
	if err == nil {
		defer slots.Close()
		sys, err = slots.System(ctx)
	}
	if err == nil {
		phantom = sys.Phantom
	} else {
		unknown = fmt.Sprintf("phantoms are not looked for: %v", err)
	}
	source, err = cfg.Source, nil
	if source == "" {
		source, err = defaultSource(ctx, db, sys)
	}
	if source == "" && err == nil {
		err = hint.Errorf(
			"set source as the relay has it, or GRANT EXECUTE ON FUNCTION pg_control_system() TO the role",
			"the role may not read the system identifier, which the default of source begins with")
	}
	return source, phantom, unknown, err
}

// defaultSource is what a relay's source is where the configuration names none; "" where the role may not
// know it. sys is the server, with no ID where no replication connection has told.
func defaultSource(ctx context.Context, db *table.DB, sys stream.System) (string, error) {
	source, err := db.DefaultSource(ctx, "SELECT")
	if err == nil && source == "" && sys.ID == "" {
		sys.ID, sys.Timeline, sys.Database, err = db.Identify(ctx)
	}
	if source == "" && sys.ID != "" {
		source = relay.DefaultSource(sys.ID, sys.Database)
	}
	return source, err
}

// progressBar draws on a terminal, and says nothing elsewhere.
func progressBar(w io.Writer) func(done, total uint64) {
	columns, terminal := terminalWidth(w)
	if !terminal {
		return nil
	}
	const most = 40
	width := uint64(max(10, min(most, columns-40)))
	var last time.Time
	return func(done, total uint64) {
		if total == 0 || done < total && time.Since(last) < 200*time.Millisecond {
			return
		}
		last = time.Now()
		n := min(done*width/total, width)
		end := ""
		if done >= total {
			end = "\n"
		}
		fmt.Fprintf(trusted(w), "\rreading the stream [%s%s] %d of %d%s",
			strings.Repeat("=", int(n)), strings.Repeat(" ", int(width-n)), done, total, end)
	}
}

func printVerify(w io.Writer, r *verify.Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	fmt.Fprintf(w, "messages   %d (sequences %d to %d)\n", r.Messages, r.FirstSeq, r.LastSeq)
	if r.Replays > 0 {
		fmt.Fprintf(w, "replays    %d\n", r.Replays)
	}
	fmt.Fprintf(w, "rows       %d marked as stored\n", r.Rows)
	if r.Pending > 0 {
		fmt.Fprintf(w, "pending    %d\n", r.Pending)
	}
	for _, k := range verify.Kinds {
		f := r.Found[k]
		fmt.Fprintf(w, "%-10s %d\n", k, f.Count)
		for _, c := range f.Examples {
			fmt.Fprintf(w, "    %s\n", escape(caseText(c)))
		}
		if more := f.Count - int64(len(f.Examples)); more > 0 {
			fmt.Fprintf(w, "    and %d more\n", more)
		}
	}
	if r.Repaired > 0 {
		fmt.Fprintf(w, "repaired   %d rows are pending again\n", r.Repaired)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note: %s\n", escape(strings.Join(strings.Fields(n), " ")))
	}
	return nil
}

func caseText(c verify.Case) string {
	text := c.Row
	if c.Seq > 0 {
		text += fmt.Sprintf(" at sequence %d", c.Seq)
	}
	if c.Detail != "" {
		text += ": " + c.Detail
	}
	return text
}
