package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/status"
)

func newConsumersCommand() *cobra.Command {
	return newGroup("consumers", "List and rewind consumers, and see to events that they failed at",
		help("consumers"), newConsumersListCommand(), newConsumersRewindCommand(), newConsumersDLQCommand())
}

// consumersCommand is a command on the tables of a consumer's database.
func consumersCommand(
	cmd *cobra.Command, do func(context.Context, *cobra.Command, *consumers.Tables, []string) error,
) *cobra.Command {
	addConfigFlags(cmd)
	schema := cmd.Flags().Lookup("schema")
	schema.Usage, schema.Hidden = "the schema of the consumers' tables (default the first outbox's)", false
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := loadConfig(cmd)
		if err != nil {
			return err
		}
		tables, err := cfg.Tables()
		if err != nil {
			return err
		}
		settings := map[string]string{"application_name": cmd.CommandPath()}
		t, err := consumers.Open(cmd.Context(), pg.Config{
			URL: cfg.Postgres.URL, Files: cfg.Postgres.files(), Settings: settings,
		}, cfg.Postgres.own(tables))
		if err != nil {
			return err
		}
		defer t.Close()
		return do(cmd.Context(), cmd, t, args)
	}
	return cmd
}

func newConsumersListCommand() *cobra.Command {
	var asJSON bool
	cmd := consumersCommand(&cobra.Command{
		Use: "list [CONSUMER]", Short: "List consumers, or the partitions of one",
		Long: help("consumers list"),
		Args: atMostOneArg("consumer", "`walpost consumers list` shows all of them"),
	}, func(ctx context.Context, cmd *cobra.Command, t *consumers.Tables, args []string) error {
		name := ""
		if len(args) > 0 {
			name = args[0]
		}
		all, err := t.List(ctx, name)
		if err != nil {
			return err
		}
		known := withEnds(ctx, cmd, all)
		switch {
		case asJSON:
			return printConsumers(cmd.OutOrStdout(), known)
		case name != "":
			return showConsumer(cmd.OutOrStdout(), known[0])
		}
		return listConsumers(cmd.OutOrStdout(), known)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	return cmd
}

// withEnds adds where the streams end. stderr says why that is not known of one.
func withEnds(ctx context.Context, cmd *cobra.Command, all []*consumers.Consumer) []status.Consumer {
	return status.WithEnds(all, func(name string) (last *uint64) {
		err := withConsumersStream(ctx, cmd, name, func(s *jetstream.Stream) error {
			info, err := s.Info(ctx)
			if err == nil {
				last = &info.LastSeq
			}
			return err
		})
		if err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "how far behind is not known: %s\n", oneLine(err.Error()))
		}
		return last
	})
}

func withConsumersStream(
	ctx context.Context, cmd *cobra.Command, name string, do func(*jetstream.Stream) error,
) error {
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	cfg.NATS.Stream = name
	s, _, done, err := openStream(ctx, cfg, cmd.CommandPath())
	if err != nil {
		return err
	}
	defer done()
	return do(s)
}

func behind(c status.Consumer, sequence uint64) string {
	n, known := c.Behind(sequence)
	if !known {
		return "-"
	}
	return fmt.Sprint(n)
}

func listConsumers(w io.Writer, all []status.Consumer) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "CONSUMER\tSTREAM\tPROCESSES\tPARTITIONS\tOWNED\tSEQUENCE\tBEHIND\tPARKED\t"+
		"DEAD LETTERS")
	for _, c := range all {
		fmt.Fprintf(columns, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%d\t%d\n",
			cell(c.Name), cell(c.Stream), c.Processes, len(c.Partitions), c.Owned(),
			c.Position(), behind(c, c.Position()), c.Parked, c.DeadLetters)
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, count(len(all), "consumer"))
	return err
}

func showConsumer(w io.Writer, c status.Consumer) error {
	filters := "every subject"
	if len(c.Filters) > 0 {
		filters = fmt.Sprint(c.Filters)
	}
	fmt.Fprintf(w, "consumer     %s\nstream       %s\nfilters      %s\nstart        %s\n",
		escape(c.Name), escape(c.Stream), escape(filters), escape(c.Start))
	fmt.Fprintf(w, "processes    %d\nparked       %d\ndead letters %d\n\n",
		c.Processes, c.Parked, c.DeadLetters)
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "PARTITION\tSEQUENCE\tBEHIND\tMOVED\tEPOCH\tOWNER")
	for _, p := range c.Partitions {
		moved := "-"
		if p.At != nil {
			moved = since(time.Since(*p.At)) + " ago"
		}
		fmt.Fprintf(columns, "%d\t%d\t%s\t%s\t%d\t%s\n",
			p.Key, p.Sequence, behind(c, p.Sequence), moved, p.Epoch, dash(p.Owner))
	}
	return columns.Flush()
}

func printConsumers(w io.Writer, all []status.Consumer) error {
	for _, c := range all {
		if err := printJSON(w, c); err != nil {
			return err
		}
	}
	return nil
}

func newConsumersRewindCommand() *cobra.Command {
	var to uint64
	var ago string
	var window time.Duration
	var reapply bool
	cmd := consumersCommand(&cobra.Command{
		Use:   "rewind CONSUMER {--to SEQUENCE | --since D}",
		Short: "Have a consumer read a part of its stream again",
		Long:  help("consumers rewind"),
		Args:  oneArg("consumer", "`walpost consumers list` shows them"),
		PreRunE: func(*cobra.Command, []string) error {
			if err := age(&window, "since", ago); err != nil {
				return err
			}
			if (to == 0) == (window == 0) {
				return &usageError{hint.Errorf("as in --to 4711 or --since 2h", "give --to or --since")}
			}
			return nil
		},
	}, func(ctx context.Context, cmd *cobra.Command, t *consumers.Tables, args []string) error {
		all, err := t.List(ctx, args[0])
		if err != nil {
			return err
		}
		r := consumers.Rewind{Name: args[0], Sequence: to}
		err = withConsumersStream(ctx, cmd, all[0].Stream, func(s *jetstream.Stream) error {
			return findRewind(ctx, s, &r, window, reapply)
		})
		if err != nil {
			return err
		}
		partitions, ids, err := t.Rewind(ctx, r)
		if err != nil {
			return err
		}
		handled := "events that were handled are skipped (--reapply handles them again)"
		if reapply {
			handled = count(int(ids), "event") + " that had been handled will be handled again"
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "rewound %s to sequence %d: %s\n",
			count(int(partitions), "partition"), r.Sequence, handled)
		return err
	})
	cmd.Flags().Uint64Var(&to, "to", 0, "the first stream sequence to read again")
	cmd.Flags().StringVar(&ago, "since", "", "what the stream stored so long ago or later, as in 90m or 72h")
	cmd.Flags().BoolVar(&reapply, "reapply", false, "handle events again that were handled")
	return cmd
}

// findRewind finds the sequence and the time of the first event to be read again.
func findRewind(
	ctx context.Context, s *jetstream.Stream, r *consumers.Rewind, window time.Duration, reapply bool,
) error {
	info, err := s.Info(ctx)
	if err != nil {
		return err
	}
	if window > 0 {
		if r.Sequence, err = s.SeqSince(ctx, time.Now().Add(-window)); err != nil {
			return err
		}
	}
	if r.Sequence < info.FirstSeq {
		return hint.Errorf(fmt.Sprintf("--to %d is everything that is there", info.FirstSeq),
			"rewind consumer %s to sequence %d: the stream begins at %d", r.Name, r.Sequence, info.FirstSeq)
	}
	errPast := hint.Errorf("`walpost consumers list "+r.Name+"` shows the sequences",
		"rewind consumer %s to sequence %d: the stream ends at %d", r.Name, r.Sequence, info.LastSeq)
	if r.Sequence > info.LastSeq {
		return errPast
	}
	if !reapply {
		return nil
	}
	next, err := s.Next(ctx, r.Sequence, "")
	if errors.Is(err, jetstream.ErrMessageGone) {
		return errPast
	}
	if err != nil {
		return err
	}
	m, err := s.Message(ctx, next)
	r.Reapply = m.At
	return err
}
