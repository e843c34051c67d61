package main

import (
	"bytes"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

// listParked lists what waits in the outboxes because of a failure, and is no dead letter.
func (c *dlqChoice) listParked(cmd *cobra.Command, args []string, asJSON bool) error {
	if given := c.given(cmd); len(given) > 0 || len(args) > 0 {
		return &usageError{hint.Errorf("leave out ids and filters; --limit and --json apply to both",
			"--parked lists rows of the outboxes, and ids and filters choose among dead letters")}
	}
	if _, err := c.filter(cmd, args); err != nil { // --limit
		return err
	}
	limit := c.limit
	if limit == 0 || asJSON && !cmd.Flags().Changed("limit") {
		limit = countMost
	}
	all, total, more, err := readParked(cmd, limit)
	if err != nil {
		return err
	}
	w := cmd.OutOrStdout()
	if !asJSON {
		return printParked(w, all, total, more)
	}
	for _, p := range all {
		if err := printJSON(w, p); err != nil {
			return err
		}
	}
	return nil
}

func readParked(cmd *cobra.Command, limit int) (all []table.Waiting, total int, more bool, err error) {
	cfg, err := loadConfig(cmd)
	if err != nil {
		return nil, 0, false, err
	}
	tables, err := cfg.Tables()
	if err != nil {
		return nil, 0, false, err
	}
	db, err := openLook(cmd.Context(), cfg, "walpost dlq")
	if err != nil {
		return nil, 0, false, err
	}
	defer db.Close()
	return db.AllWaiting(cmd.Context(), tables, countMost, limit)
}

// pointToParked says how many rows are parked, beside a list of all dead letters. It is silent where that
// cannot be read at once.
func pointToParked(cmd *cobra.Command) string {
	n, err := countParked(cmd)
	switch {
	case err != nil || n == 0:
		return ""
	case n == 1:
		return "; 1 row is parked: walpost dlq list --parked"
	}
	return fmt.Sprintf("; %s rows are parked: walpost dlq list --parked", counted(&n))
}

func countParked(cmd *cobra.Command) (sum int, err error) {
	ctx := cmd.Context()
	l, err := load(cmd.Flags()) // withDLQ has warned
	if err != nil {
		return 0, err
	}
	tables, err := l.cfg.Tables()
	if err != nil {
		return 0, err
	}
	db, err := openLook(ctx, l.cfg, "walpost dlq")
	if err != nil {
		return 0, err
	}
	defer db.Close()
	if err := db.Limit(ctx, status.Look); err != nil {
		return 0, err
	}
	for _, t := range tables {
		if !t.Layout.Records() {
			continue
		}
		err := db.Bind(ctx, t)
		if err == nil {
			err = db.Complete(ctx, t)
		}
		if err != nil {
			return 0, err
		}
		n, _, err := db.RecordedCount(ctx, t, countMost)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// printParked writes a table as listLetters does.
func printParked(w io.Writer, all []table.Waiting, total int, more bool) error {
	var text bytes.Buffer
	columns := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "OUTBOX\tROW\tEVENT TYPE\tAGGREGATE\tROWS\tATTEMPTS\tNEXT TRY\tERROR")
	for _, p := range all {
		fmt.Fprintf(columns, "%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\n", cell(p.Outbox), cell(known(p.ParkedID)),
			cell(known(p.EventType)), cell(aggregateText(p.AggregateType, p.AggregateID)),
			p.Rows, p.Attempts, nextTry(p), escape(p.Error))
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	if len(all) > 0 {
		writeTable(w, text.String())
	}
	last := "no row is parked or held"
	if total > 0 {
		last = fmt.Sprintf("rows of %s wait", count(total, "aggregate"))
	}
	if total > len(all) {
		last += fmt.Sprintf(", and %d are listed", len(all))
	}
	if more {
		last += fmt.Sprintf("; only the first %d rows of each outbox were looked at", countMost)
	}
	_, err := fmt.Fprintln(w, last)
	return err
}

// nextTry is of a parked row: one that is held goes with the row that it waits for.
func nextTry(p table.Waiting) string {
	switch {
	case p.ParkedID == nil || p.RetryAt == nil:
		return "-"
	case time.Until(*p.RetryAt) <= 0:
		return "now"
	}
	return "in " + since(time.Until(*p.RetryAt))
}
