package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
)

func newRetentionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "retention",
		Short: "Archive delivered rows and drop old ones, once",
		Long:  help("retention"),
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			report, err := retain(cmd.Context(), cfg, cmd.ErrOrStderr())
			if report != nil {
				err = apart(err, printRetention(cmd.OutOrStdout(), report, asJSON), obstacles(report))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

// retain makes the pass. The report is nil where it did not begin.
func retain(ctx context.Context, cfg *Config, stderr io.Writer) (*retention.Report, error) {
	tables, err := cfg.Tables()
	if err != nil {
		return nil, err
	}
	db := database(cfg, "walpost")
	if err := table.CheckDirect(ctx, db); err != nil {
		return nil, err
	}
	return retention.Run(ctx, db, retention.Options{
		Tables:       tables,
		ArchiveAfter: cfg.Retention.ArchiveAfter,
		DeleteAfter:  cfg.Retention.DeleteAfter, ExcludedAfter: cfg.Retention.ExcludedAfter,
		DropAfter: cfg.Retention.DropAfter,
		Progress: every(10*time.Second, func(r *retention.Report) {
			fmt.Fprintln(stderr, "so far:", summary(r))
		}),
	})
}

// obstacles is an error where an outbox is to be archived and cannot be: a typo in a cron job must not look
// like success.
func obstacles(r *retention.Report) error {
	for _, t := range r.Tables {
		if t.Obstacle {
			return hint.Errorf(
				"correct that, or turn it off (retention.archive_after: 0s, or delete_after: 0s)",
				"%s keeps its processed rows: %s", t.Table, t.Skipped)
		}
	}
	return nil
}

// every lets a call through when the last one, or the beginning, is d ago.
func every(d time.Duration, f func(*retention.Report)) func(*retention.Report) {
	last := time.Now()
	return func(r *retention.Report) {
		if time.Since(last) >= d {
			last = time.Now()
			f(r)
		}
	}
}

func summary(r *retention.Report) string {
	deleted := r.Purged
	var archived int64
	for _, t := range r.Tables {
		archived, deleted = archived+t.Archived, deleted+t.Deleted
	}
	var parts []string
	for _, part := range []struct {
		n    int64
		what string
	}{{archived, "rows archived"}, {deleted, "old rows deleted"}, {r.ExpiredKeys, "expired keys deleted"}} {
		if part.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.n, part.what))
		}
	}
	if len(parts) == 0 {
		return "nothing yet"
	}
	return strings.Join(parts, ", ")
}

func printRetention(w io.Writer, r *retention.Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	if r.Busy {
		_, err := fmt.Fprintln(w, "another pass is running: nothing done")
		return err
	}
	for _, t := range r.Tables {
		if t.Deleted > 0 {
			fmt.Fprintf(w, "%s: %d old rows deleted\n", t.Table, t.Deleted)
		}
		switch {
		case t.Obstacle:
			fmt.Fprintf(w, "%s: keeps its processed rows: %s\n", t.Table, t.Skipped)
		case t.Skipped != "":
			fmt.Fprintf(w, "%s: %s\n", t.Table, t.Skipped)
		default:
			fmt.Fprintf(w, "%s: %d rows archived\n", t.Table, t.Archived)
		}
	}
	if len(r.Created) > 0 {
		fmt.Fprintf(w, "created %s\n", strings.Join(r.Created, ", "))
	}
	if len(r.Dropped) > 0 {
		fmt.Fprintf(w, "dropped %s\n", strings.Join(r.Dropped, ", "))
	}
	for _, k := range r.Kept {
		fmt.Fprintln(w, k)
	}
	if r.Purges {
		fmt.Fprintf(w, "%d old rows deleted from the archive's default partition\n", r.Purged)
	}
	if r.HasKeys {
		fmt.Fprintf(w, "%d expired idempotency keys deleted\n", r.ExpiredKeys)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	return nil
}

// apart has errors that were joined printed each with its own hint.
func apart(all ...error) error {
	var out problems
	for _, err := range all {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			out = append(out, joined.Unwrap()...)
		} else if err != nil {
			out = append(out, err)
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
