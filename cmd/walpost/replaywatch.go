package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
)

// watchReplay shows how far a request is until it has ended. It ends with ctx, too; the relay goes on.
func watchReplay(ctx context.Context, w io.Writer, db *table.DB, id int64) error {
	p := &replayProgress{w: w, begun: time.Now(), every: 5 * time.Second}
	if columns, terminal := terminalWidth(w); terminal {
		p.bar, p.every = max(10, min(40, columns-50)), 0
	}
	defer p.end()
	for {
		r, err := db.ReadReplay(ctx, id)
		switch {
		case ctx.Err() != nil:
			p.end()
			fmt.Fprintf(w, "replay %d goes on: `walpost replay list` shows it, "+
				"`walpost replay cancel %[1]d` ends it\n", id)
			return nil
		case err != nil:
			return err
		}
		p.show(r)
		if !r.State.Open() {
			return nil
		}
		sleep.For(ctx, 250*time.Millisecond)
	}
}

// replayProgress is a bar on a terminal, and a line now and then elsewhere.
type replayProgress struct {
	w     io.Writer
	bar   int // columns
	every time.Duration
	begun time.Time
	first int64
	said  time.Time
	drawn bool
}

func (p *replayProgress) show(r *table.Replay) {
	if r.State.Open() && time.Since(p.said) < p.every {
		return
	}
	if p.said.IsZero() {
		p.first = r.Sent
	}
	p.said = time.Now()
	done := r.Sent + r.Refused
	rate := float64(r.Sent-p.first) / max(time.Since(p.begun).Seconds(), 0.001)
	text := fmt.Sprintf("%d rows, %.0f/s", done, rate)
	if r.Total != nil {
		text = fmt.Sprintf("%d of %d rows, %.0f/s", done, *r.Total, rate)
		if left := *r.Total - done; left > 0 && rate > 0 && r.State.Open() {
			text += ", " + (time.Duration(float64(left)/rate) * time.Second).String() + " left"
		}
	}
	if r.State == table.ReplayRequested {
		text = "waiting for the relay"
	}
	if p.bar == 0 {
		fmt.Fprintf(p.w, "replay %d: %s\n", r.ID, text)
		return
	}
	bar := ""
	if r.Total != nil {
		n := int(min(done*int64(p.bar)/max(*r.Total, 1), int64(p.bar)))
		bar = "[" + strings.Repeat("=", n) + strings.Repeat(" ", p.bar-n) + "] "
	}
	p.drawn = true
	fmt.Fprintf(trusted(p.w), "\r\x1b[Kreplay %d %s%s", r.ID, bar, text)
}

func (p *replayProgress) end() {
	if p.drawn {
		fmt.Fprintln(p.w)
	}
	p.drawn = false
}

// printEnd says how a request stands, and returns an error where it has failed.
func (c *replayCommand) printEnd(cmd *cobra.Command, db *table.DB, id int64) error {
	ctx := context.WithoutCancel(cmd.Context())
	r, err := db.ReadReplay(ctx, id)
	if err != nil {
		return err
	}
	if c.json {
		err = printJSON(cmd.OutOrStdout(), r)
	} else {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "replay %d: %s, %s published again, %d refused\n",
			r.ID, r.State, count(int(r.Sent), "row"), r.Refused)
	}
	note := ""
	if r.LastError != nil {
		note = ": " + oneLine(*r.LastError)
	}
	switch {
	case err != nil:
		return err
	case r.State == table.ReplayFailed, r.State == table.ReplayCancelled:
		return fmt.Errorf("replay %d was not finished: it is %s%s", r.ID, r.State, note)
	case r.Refused > 0:
		return hint.Errorf("the relay's log names them", "replay %d: %s refused%s",
			r.ID, count(int(r.Refused), "row"), note)
	case note != "":
		fmt.Fprintf(cmd.ErrOrStderr(), "note%s\n", note)
	}
	return nil
}

func (c *replayCommand) printCounts(cmd *cobra.Command, types []table.TypeCount, total int64) error {
	known := total < replayCounts
	if c.json {
		if types == nil {
			types = []table.TypeCount{}
		}
		return printJSON(cmd.OutOrStdout(), struct {
			Rows       int64             `json:"rows"`
			CountLimit int               `json:"count_limit"`
			Types      []table.TypeCount `json:"types"`
		}{total, replayCounts, types})
	}
	columns := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	if len(types) > 0 {
		fmt.Fprintln(columns, "EVENT TYPE\tROWS")
	}
	for _, x := range types {
		fmt.Fprintf(columns, "%s\t%d\n", cell(x.EventType), x.Rows)
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s would be published again\n", rowsText(total, known))
	return err
}

func newReplayListCommand() *cobra.Command {
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list", Short: "List requests, the newest first", Long: help("replay list"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withReplays(cmd, func(ctx context.Context, db *table.DB) error {
				all, err := db.ListReplays(ctx, max(limit, 1))
				if err != nil {
					return err
				}
				if asJSON {
					for _, r := range all {
						err = errors.Join(err, printJSON(cmd.OutOrStdout(), r))
					}
					return err
				}
				return listReplays(cmd.OutOrStdout(), all)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "at most so many")
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

func listReplays(w io.Writer, all []*table.Replay) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "REPLAY\tSTATE\tOUTBOX\tSLOT\tTO STREAM\tREQUESTED\tBY\tROWS\tSENT\tREFUSED\tNOTE")
	for _, r := range all {
		total, to, note := "-", "-", "-"
		if r.Total != nil {
			total = fmt.Sprint(*r.Total)
		}
		if r.ToStream != nil {
			to = *r.ToStream
		}
		if r.LastError != nil {
			note = cut(oneLine(*r.LastError), 60)
		}
		fmt.Fprintf(columns, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", r.ID, r.State,
			cell(r.Outbox), cell(r.Slot), cell(to), r.RequestedAt.UTC().Format(time.RFC3339),
			cell(r.RequestedBy), total, r.Sent, r.Refused, cell(note))
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, count(len(all), "request"))
	return err
}

func newReplayCancelCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cancel REPLAY", Short: "End a request", Long: help("replay cancel"),
		Args: oneArg("number", replayNumbers),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseReplayID(args[0])
			if err != nil {
				return err
			}
			return withReplays(cmd, func(ctx context.Context, db *table.DB) error {
				ok, err := db.CancelReplay(ctx, id)
				if err != nil {
					return err
				}
				r, err := db.ReadReplay(ctx, id)
				if err == nil && !ok {
					err = fmt.Errorf("cancel replay %d: it is %s", id, r.State)
				}
				if err == nil {
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "replay %d is cancelled after %s\n",
						r.ID, count(int(r.Sent), "row"))
				}
				return err
			})
		},
	}
	addConfigFlags(cmd)
	return cmd
}

// replayNumbers says where the numbers of replays are found.
const replayNumbers = "`walpost replay list` shows the numbers, in the first column"

func parseReplayID(text string) (id int64, err error) {
	if _, err := fmt.Sscan(text, &id); err != nil || id < 1 || fmt.Sprint(id) != text {
		return 0, &usageError{hint.Errorf(replayNumbers, "%q is not the number of a replay", text)}
	}
	return id, nil
}

func withReplays(cmd *cobra.Command, do func(context.Context, *table.DB) error) error {
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	db, err := openLook(cmd.Context(), cfg, "walpost replay")
	if err != nil {
		return err
	}
	defer db.Close()
	return do(cmd.Context(), db)
}
