package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/hint"
)

func newConsumersDLQCommand() *cobra.Command {
	return newGroup("dlq", "List, show, retry and discard events that consumers failed at",
		help("consumers dlq"), newParkedListCommand(), newParkedShowCommand(),
		newParkedChangeCommand("retry", "retried", "Try events again", (*consumers.Tables).Retry),
		newParkedChangeCommand("discard", "discarded", "Delete events for good", (*consumers.Tables).Discard))
}

func newParkedListCommand() *cobra.Command {
	var f consumers.Filter
	var asJSON bool
	cmd := consumersCommand(&cobra.Command{
		Use: "list", Short: "List dead letters and parked events, oldest first",
		Long: help("consumers dlq list"), Args: noArgs,
	}, func(ctx context.Context, cmd *cobra.Command, t *consumers.Tables, _ []string) error {
		if asJSON {
			print := func(p consumers.Parked) error { return printJSON(cmd.OutOrStdout(), p) }
			return t.Parked(ctx, f, false, print)
		}
		return listParked(ctx, cmd.OutOrStdout(), t, f)
	})
	cmd.Flags().StringVar(&f.Consumer, "consumer", "", "those of one consumer")
	cmd.Flags().BoolVar(&f.DeadOnly, "dead", false, "dead letters only")
	cmd.Flags().IntVar(&f.Limit, "limit", 0, "at most so many; 0 is all")
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	return cmd
}

func listParked(ctx context.Context, w io.Writer, t *consumers.Tables, f consumers.Filter) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "NUMBER\tCONSUMER\tSEQUENCE\tEVENT TYPE\tEVENT\tATTEMPTS\tAGE\tSTATE\tERROR")
	shown := 0
	err := t.Parked(ctx, f, false, func(p consumers.Parked) error {
		shown++
		_, err := fmt.Fprintf(columns, "%d\t%s\t%d\t%s\t%s\t%d\t%s\t%s\t%s\n",
			p.Number, cell(p.Consumer), p.Sequence, cell(p.Type), cell(p.ID), p.Attempts,
			since(time.Since(p.ParkedAt)), parkedState(p), cell(known(p.LastError)))
		return err
	})
	if err == nil {
		err = columns.Flush()
	}
	if err == nil {
		_, err = fmt.Fprintln(w, count(shown, "event"))
	}
	return err
}

func parkedState(p consumers.Parked) string {
	pause := time.Until(p.NextAttempt)
	switch {
	case p.DeadAt != nil:
		return "dead letter"
	case p.Attempts == 0:
		return "waits"
	case pause > 0:
		return "retried in " + since(pause)
	}
	return "due"
}

func newParkedShowCommand() *cobra.Command {
	var numbers []int64
	var asJSON bool
	cmd := consumersCommand(&cobra.Command{
		Use: "show NUMBER", Short: "Show one event",
		Long: help("consumers dlq show"),
		Args: cobra.MatchAll(
			oneArg("number of an event", parkedNumbers),
			func(_ *cobra.Command, args []string) error { return parseNumbers(&numbers, args) },
		),
	}, func(ctx context.Context, cmd *cobra.Command, t *consumers.Tables, _ []string) error {
		p, err := t.Show(ctx, numbers[0])
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(cmd.OutOrStdout(), p)
		}
		return showParked(cmd.OutOrStdout(), p)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	return cmd
}

func showParked(w io.Writer, p *consumers.Parked) error {
	var event struct {
		TenantID, AggregateType, AggregateID string
		Payload                              []byte
	}
	if err := json.Unmarshal(p.Event, &event); err != nil {
		return fmt.Errorf("read event %d: %w", p.Number, err)
	}
	for _, line := range [][2]string{
		{"number", fmt.Sprint(p.Number)},
		{"consumer", p.Consumer},
		{"sequence", fmt.Sprint(p.Sequence)},
		{"event type", p.Type},
		{"event", p.ID},
		{"source", p.Source},
		{"tenant", dash(event.TenantID)},
		{"aggregate", dash(event.AggregateType) + "/" + dash(event.AggregateID)},
		{"attempts", fmt.Sprint(p.Attempts)},
		{"state", parkedState(*p)},
		{"parked at", p.ParkedAt.UTC().Format(time.RFC3339)},
		{"last error", known(p.LastError)},
	} {
		fmt.Fprintf(w, "%-12s %s\n", line[0], escape(line[1]))
	}
	text := string(event.Payload)
	_, err := fmt.Fprintf(w, "\nThe payload:\n    %s\n", pretty(&text))
	return err
}

func newParkedChangeCommand(
	verb, done, short string, do func(*consumers.Tables, context.Context, consumers.Filter) (int64, error),
) *cobra.Command {
	var f consumers.Filter
	cmd := consumersCommand(&cobra.Command{
		Use: verb + " {NUMBER... | --consumer CONSUMER}", Short: short, Long: help("consumers dlq " + verb),
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && f.Consumer == "" {
				return &usageError{hint.Errorf(
					"give numbers, which `walpost consumers dlq list` shows, or --consumer",
					"%s: which events?", cmd.CommandPath())}
			}
			return parseNumbers(&f.Numbers, args)
		},
	}, func(ctx context.Context, cmd *cobra.Command, t *consumers.Tables, _ []string) error {
		n, err := do(t, ctx, f)
		if err != nil {
			return err
		}
		if missing := len(f.Numbers) - int(n); missing > 0 {
			err = hint.Errorf("`walpost consumers dlq list` shows those that are there",
				"%s not found", count(missing, "event"))
		}
		_, writing := fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", done, count(int(n), "event"))
		return errors.Join(err, writing)
	})
	cmd.Flags().StringVar(&f.Consumer, "consumer", "", "those of one consumer")
	cmd.Flags().BoolVar(&f.DeadOnly, "dead", false, "dead letters only")
	return cmd
}

// parkedNumbers says where the numbers of parked events are found.
const parkedNumbers = "`walpost consumers dlq list` shows the numbers, in the first column"

func parseNumbers(numbers *[]int64, args []string) (err error) {
	if *numbers, err = parseIDs(args); err != nil {
		return &usageError{hint.Errorf(parkedNumbers, "%v is no number of an event", args)}
	}
	return nil
}
