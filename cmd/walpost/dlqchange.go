package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
)

// dlqChange is retry or discard.
type dlqChange struct {
	choice            dlqChoice
	all, dryRun, json bool
	yes               bool
	verb              string // "retried" or "discarded"

	do func(*deadletter.Queue, context.Context, deadletter.Filter, bool, func(deadletter.Outcome)) error
}

func newDLQRetryCommand() *cobra.Command {
	c := &dlqChange{verb: "retried", yes: true, do: (*deadletter.Queue).Retry}
	return c.command(&cobra.Command{
		Use:   "retry {DEAD_LETTER_ID... | FLAGS | --all}",
		Short: "Put rows back into their outboxes",
		Long:  help("dlq retry"),
	})
}

func newDLQDiscardCommand() *cobra.Command {
	c := &dlqChange{verb: "discarded", do: (*deadletter.Queue).Discard}
	cmd := &cobra.Command{
		Use:   "discard {DEAD_LETTER_ID... | FLAGS | --all}",
		Short: "Delete dead letters for good",
		Long:  help("dlq discard"),
	}
	cmd.Flags().BoolVar(&c.yes, "yes", false, "do not ask")
	return c.command(cmd)
}

func (c *dlqChange) command(cmd *cobra.Command) *cobra.Command {
	c.choice.addFlags(cmd, 0)
	cmd.Flags().BoolVar(&c.all, "all", false, "all dead letters")
	cmd.Flags().BoolVar(&c.dryRun, "dry-run", false, "change nothing, and say what would be done")
	cmd.Flags().BoolVar(&c.json, "json", false, "write JSON")
	addConfigFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f, err := c.check(cmd, args)
		if err != nil {
			return err
		}
		return withDLQ(cmd, func(ctx context.Context, q *deadletter.Queue) error {
			return c.run(ctx, cmd, q, f)
		})
	}
	return cmd
}

// check refuses what is not said plainly enough for a change.
func (c *dlqChange) check(cmd *cobra.Command, args []string) (deadletter.Filter, error) {
	f, err := c.choice.filter(cmd, args)
	if err != nil {
		return f, err
	}
	chosen := len(f.IDs) > 0 || len(c.choice.given(cmd)) > 0
	switch {
	case !chosen && !c.all:
		return f, &usageError{hint.Errorf("give dead letter ids, or flags such as --event-type, or --all",
			"%s: which dead letters?", cmd.CommandPath())}
	case chosen && c.all:
		return f, &usageError{hint.Errorf("leave one of them out", "--all excludes ids and filters")}
	}
	return f, canAsk(cmd, c.yes || c.dryRun, "add --yes, perhaps after a look with --dry-run")
}

// canAsk refuses a change that is to be confirmed where nobody can be asked.
func canAsk(cmd *cobra.Command, yes bool, advice string) error {
	if _, terminal := terminalWidth(cmd.InOrStdin()); !yes && !terminal {
		return &usageError{hint.Errorf(advice, "%s has no terminal to ask on", cmd.CommandPath())}
	}
	return nil
}

func (c *dlqChange) run(
	ctx context.Context, cmd *cobra.Command, q *deadletter.Queue, f deadletter.Filter,
) error {
	if !c.yes && !c.dryRun {
		var err error
		if f, err = q.Now(ctx, f); err != nil {
			return err
		}
		if err := confirm(ctx, cmd, q, f); err != nil {
			return err
		}
	}
	wanted := slices.Compact(slices.Sorted(slices.Values(f.IDs)))
	r := &dlqReport{w: cmd.OutOrStdout(), change: c, wanted: wanted, cures: map[string]int{}}
	err := c.do(q, ctx, f, c.dryRun, r.add)
	r.end(err)
	if err == nil && r.left > 0 {
		err = hint.Errorf("each of them says why above", "%s left or missing", count(r.left, "dead letter"))
	}
	return errors.Join(err, r.err)
}

func confirm(ctx context.Context, cmd *cobra.Command, q *deadletter.Queue, f deadletter.Filter) error {
	n, err := q.Count(ctx, f, countMost)
	if err != nil || n == 0 {
		return err
	}
	if f.Limit > 0 {
		n = min(n, f.Limit)
	}
	what := count(n, "dead letter")
	if n == countMost {
		what = "at least " + what
	}
	if !confirmed(cmd, fmt.Sprintf("Discard %s for good?", what)) {
		return errors.New("nothing was discarded")
	}
	return nil
}

// dlqReport tells what became of each dead letter.
type dlqReport struct {
	w          io.Writer
	change     *dlqChange
	done, left int
	wanted     []int64 // the ids that were given and not heard of yet
	err        error   // of the writer
	// cures counts, by class, what was retried and fails again unless something is changed.
	cures map[string]int
}

type dlqResult struct {
	ID     int64  `json:"dead_letter_id"`
	Outbox string `json:"outbox,omitempty"`
	RowID  string `json:"row_id,omitempty"`
	Result string `json:"result"`
	Error  string `json:"error,omitempty"`
	Hint   string `json:"hint,omitempty"`
}

func (r *dlqReport) add(o deadletter.Outcome) {
	result := dlqResult{ID: o.ID, Outbox: o.Outbox, RowID: o.RowID, Result: r.change.verb}
	r.wanted = slices.DeleteFunc(r.wanted, func(id int64) bool { return id == o.ID })
	if o.Err == nil {
		r.done++
		if deadletter.Cure(o.Class) != "" && r.change.verb == "retried" {
			r.cures[o.Class]++
		}
	} else {
		r.left++
		result.Result, result.Error, result.Hint = "left", oneLine(o.Err.Error()), hint.Of(o.Err)
	}
	r.write(result)
}

// write says nothing of the many that went well, unless in JSON.
func (r *dlqReport) write(result dlqResult) {
	switch {
	case r.err != nil:
	case r.change.json:
		r.err = printJSON(r.w, result)
	case result.Error != "":
		_, r.err = fmt.Fprintf(r.w, "%s %d%s: %s\n",
			result.Result, result.ID, escape(from(result)), escape(result.Error))
		if result.Hint != "" {
			fmt.Fprintf(r.w, "    hint: %s\n", escape(result.Hint))
		}
	}
}

func from(r dlqResult) string {
	if r.Outbox == "" {
		return ""
	}
	return fmt.Sprintf(" (%s, row %s)", r.Outbox, cut(r.RowID, 40))
}

func (r *dlqReport) end(err error) {
	for _, id := range r.wanted {
		if err == nil {
			r.left++
			r.write(dlqResult{ID: id, Result: "missing", Error: "there is no such dead letter (any more)"})
		}
	}
	would := ""
	if r.change.dryRun {
		would = "would have "
	}
	if !r.change.json && (err == nil || r.done > 0) {
		fmt.Fprintf(r.w, "%s%s %s\n", would, r.change.verb, count(r.done, "dead letter"))
		for _, class := range slices.Sorted(maps.Keys(r.cures)) {
			fmt.Fprintf(r.w, "note: %d of class %s: %s\n", r.cures[class], class, deadletter.Cure(class))
		}
	}
}
