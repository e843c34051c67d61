package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func newOutboxCommand() *cobra.Command {
	return newGroup("outbox", "Show what is remembered of outboxes, and answer what a relay asks",
		help("outbox"), newOutboxListCommand(), newOutboxKeepCommand(), newOutboxRenewCommand(),
		newOutboxSearchCommand(), newOutboxForgetCommand())
}

// outboxCommand is a command on outbox_sent.
func outboxCommand(
	cmd *cobra.Command, do func(*cobra.Command, *Config, *table.DB, []string) error,
) *cobra.Command {
	addConfigFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := loadConfig(cmd)
		if err != nil {
			return err
		}
		db, err := openLook(cmd.Context(), cfg, "walpost outbox")
		if err != nil {
			return err
		}
		defer db.Close()
		return do(cmd, cfg, db, args)
	}
	return cmd
}

func newOutboxListCommand() *cobra.Command {
	var asJSON bool
	cmd := outboxCommand(&cobra.Command{
		Use: "list", Short: "List what is remembered of outboxes", Long: help("outbox list"), Args: noArgs,
	}, func(cmd *cobra.Command, _ *Config, db *table.DB, _ []string) error {
		all, err := readSent(cmd, db, "SELECT")
		if err != nil {
			return err
		}
		if asJSON {
			for i := range all {
				if err := printJSON(cmd.OutOrStdout(), &all[i]); err != nil {
					return err
				}
			}
			return nil
		}
		return listSent(cmd.OutOrStdout(), all)
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON, a line for each")
	return cmd
}

func readSent(cmd *cobra.Command, db *table.DB, privileges string) ([]table.Sent, error) {
	all, exists, err := db.Sent(cmd.Context(), privileges)
	if err == nil && !exists {
		err = hint.Errorf("run `walpost migrate up` as the tables' owner",
			"table %s does not exist: nothing is remembered of outboxes", table.SentTable)
	}
	return all, err
}

func listSent(w io.Writer, all []table.Sent) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns,
		"OUTBOX\tSOURCE\tSTREAM\tSLOT\tJOINED\tSHARD\tWHERE\tFIRST START\tPENDING ROWS THEN")
	for _, s := range all {
		joined, begun, initial := "no", "the next one", "-"
		if s.PublishedAs != "" {
			joined = "yes"
		}
		if s.BegunAt != nil {
			begun = s.BegunAt.UTC().Format("2006-01-02 15:04:05 MST")
			initial = map[string]string{"pending": "published", "none": "marked"}[s.Initial]
		}
		stream := s.Stream
		if s.Domain != "" {
			stream += "@" + s.Domain
		}
		fmt.Fprintf(columns, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", cell(s.Outbox), cell(s.Source),
			cell(stream), cell(s.Slot), joined, dash(s.Shard), cell(dash(s.Condition)), begun, initial)
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, count(len(all), "row"))
	return err
}

func newOutboxKeepCommand() *cobra.Command {
	return outboxCommand(&cobra.Command{
		Use: "keep OUTBOX", Short: "Say that an outbox was delivered before: what is pending is published",
		Long: help("outbox keep"), Args: oneOutbox,
	}, func(cmd *cobra.Command, cfg *Config, db *table.DB, args []string) error {
		t, s, err := sentOf(cmd, cfg, db, args[0])
		var source string
		if err == nil {
			source, err = defaultSource(cmd.Context(), db, stream.System{})
		}
		if err == nil {
			err = db.Keep(cmd.Context(), t, source)
		}
		if err != nil {
			return err
		}
		s.Outbox = t.String()
		if err := db.NoteSent(cmd.Context(), *s, true); err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(),
			"%s was delivered before: a start publishes what is pending, whatever postgres.initial says\n",
			s.Outbox)
		return err
	})
}

func newOutboxRenewCommand() *cobra.Command {
	return outboxCommand(&cobra.Command{
		Use: "renew OUTBOX", Short: "Make the next start of an outbox its first one",
		Long: help("outbox renew"), Args: oneOutbox,
	}, func(cmd *cobra.Command, cfg *Config, db *table.DB, args []string) error {
		_, s, err := sentOf(cmd, cfg, db, args[0])
		if err != nil {
			return err
		}
		if err := takeLock(cmd.Context(), db, "stop that relay first: its start was made"); err != nil {
			return err
		}
		used, err := db.SlotInUse(cmd.Context(), *s)
		if err == nil && used {
			err = hint.Errorf("stop that relay first: its start was made",
				"a relay with another slot delivers outbox %s", s.Outbox)
		}
		if err != nil {
			return err
		}
		if err := db.NoteSent(cmd.Context(), *s, false); err != nil {
			return err
		}
		then := "publishes what is pending"
		if cfg.Postgres.Initial == "none" {
			then = "marks what is pending then as processed, without publishing it (postgres.initial: none)"
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "the next start of %s is its first one: it %s\n",
			s.Outbox, then)
		return err
	})
}

func newOutboxSearchCommand() *cobra.Command {
	return outboxCommand(&cobra.Command{
		Use: "search OUTBOX", Short: "Have the relay search a whole append-only table for pending rows",
		Long: help("outbox search"), Args: oneOutbox,
	}, func(cmd *cobra.Command, cfg *Config, db *table.DB, args []string) error {
		t, err := chooseOutbox(cfg, args[0])
		if err == nil {
			err = db.Bind(cmd.Context(), t)
		}
		if err == nil {
			err = db.Complete(cmd.Context(), t)
		}
		if err != nil {
			return err
		}
		if !table.Journals(t) {
			return hint.Errorf("nothing is to be done: each search looks at every row without a mark",
				"outbox %s has mark %s", t, t.Mark)
		}
		known, err := db.SearchAgain(cmd.Context(), t, nil)
		if err == nil && !known {
			err = hint.Errorf("nothing is to be done: a first search looks at the whole table",
				"no relay has searched outbox %s yet", t)
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(),
			"the relay searches the whole table of %s for pending rows, and logs when it has\n", t)
		return err
	})
}

func newOutboxForgetCommand() *cobra.Command {
	return outboxCommand(&cobra.Command{
		Use: "forget OUTBOX", Short: "Delete what is remembered of an outbox that no relay delivers any more",
		Long: help("outbox forget"), Args: oneOutbox,
	}, func(cmd *cobra.Command, cfg *Config, db *table.DB, args []string) error {
		tables, err := cfg.Tables()
		if err != nil {
			return err
		}
		if err := db.Bind(cmd.Context(), tables...); err != nil {
			return err
		}
		if slices.ContainsFunc(tables, func(t *outbox.Table) bool { return t.String() == args[0] }) {
			return hint.Errorf("`walpost outbox renew "+args[0]+"` makes the next start its first one; "+
				"to forget it, take it out of outboxes first",
				"outbox %s is configured: its relay would find traces of itself", args[0])
		}
		all, err := readSent(cmd, db, "SELECT, DELETE")
		if err != nil {
			return err
		}
		var names []string
		for i := range all {
			names = append(names, all[i].Outbox)
		}
		if !slices.Contains(names, args[0]) {
			slices.Sort(names)
			return hint.Errorf("`walpost outbox list` shows what is: "+
				strings.Join(slices.Compact(names), ", "), "nothing is remembered of outbox %s", args[0])
		}
		relay, err := db.Deliverer(cmd.Context(), []table.Sent{{Outbox: args[0]}}, 0)
		if err == nil && relay != nil {
			err = hint.Errorf("stop that relay first, or take the outbox out of its configuration",
				"a relay delivers outbox %s: slot %s, process %d of the server",
				args[0], relay.Slot, relay.PID)
		}
		if err != nil {
			return err
		}
		n, err := db.ForgetSent(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "forgot %s: %s of %s\n",
			args[0], count(int(n), "row"), table.SentTable)
		return err
	})
}

var oneOutbox = oneArg("outbox", "as in public.outbox_messages; `walpost outbox list` shows them")

// sentOf is a configured outbox, and its row of outbox_sent.
func sentOf(
	cmd *cobra.Command, cfg *Config, db *table.DB, name string,
) (*outbox.Table, *table.Sent, error) {
	t, err := chooseOutbox(cfg, name)
	if err == nil {
		err = db.Bind(cmd.Context(), t)
	}
	if err != nil {
		return nil, nil, err
	}
	if _, err := readSent(cmd, db, table.SentPrivileges); err != nil {
		return nil, nil, err
	}
	source, _, _, err := identifySource(cmd.Context(), cfg, database(cfg, "walpost outbox"))
	if err != nil {
		return nil, nil, err
	}
	return t, &table.Sent{
		Outbox: t.String(), Source: source, Shard: t.Shard.String(), Condition: t.Where,
		Stream: cfg.NATS.Stream, Domain: cfg.NATS.Domain, Slot: cfg.Postgres.Slot, Initial: "pending",
	}, nil
}
