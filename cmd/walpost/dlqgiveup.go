package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// dlqGiveUp is `walpost dlq give-up`.
type dlqGiveUp struct {
	outbox    string
	yes, json bool
}

// giveUpWait is how long a change of one row may take, with its wait for the row's lock.
const giveUpWait = 10 * time.Second

func newDLQGiveUpCommand() *cobra.Command {
	c := &dlqGiveUp{}
	cmd := &cobra.Command{
		Use:   "give-up ROW_ID...",
		Short: "Make parked rows dead letters without their other retries",
		Long:  help("dlq give-up"),
		RunE:  c.run,
	}
	cmd.Flags().StringVar(&c.outbox, "outbox", "", "of this table, where the relay has several")
	cmd.Flags().BoolVar(&c.yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&c.json, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

func (c *dlqGiveUp) run(cmd *cobra.Command, ids []string) error {
	if len(ids) == 0 {
		return &usageError{hint.Errorf("`walpost dlq list --parked` shows the ids, in the column ROW",
			"%s: which rows?", cmd.CommandPath())}
	}
	if err := canAsk(cmd, c.yes, "add --yes"); err != nil {
		return err
	}
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	t, err := chooseOutbox(cfg, c.outbox)
	if err != nil {
		return err
	}
	if !t.Layout.Records() {
		return hint.Errorf("`walpost dlq list` shows them",
			"no row of %s is parked: its layout and mark make a row that fails a dead letter at once", t)
	}
	if !c.yes && !confirmed(cmd, fmt.Sprintf(
		"Give up %s of %s, and let later rows of the aggregate follow?", count(len(ids), "row"), t)) {
		return errors.New("nothing was given up")
	}
	db, err := table.OpenConsole(cmd.Context(), database(cfg, "walpost dlq"), giveUpWait)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.InspectDelivered(cmd.Context(), t); err != nil {
		return db.ExplainRead(cmd.Context(), t, err)
	}
	return c.each(cmd, db, t, ids, cfg)
}

// each gives up one row after the other: one that cannot be given up keeps no other from it.
func (c *dlqGiveUp) each(cmd *cobra.Command, db *table.DB, t *outbox.Table, ids []string, cfg *Config) error {
	left := 0
	for _, id := range ids {
		err := db.GiveUp(cmd.Context(), t, id, cfg.Fallback.MaxAttempts)
		if err != nil && cmd.Context().Err() != nil {
			return fmt.Errorf("give up row %s: %w", id, err)
		}
		if err != nil {
			left++
		}
		if err := c.print(cmd, t, id, err, cfg.Fallback.Interval); err != nil {
			return err
		}
	}
	if left > 0 {
		return hint.Errorf("each of them says why above", "%s not given up", count(left, "row"))
	}
	return nil
}

func (c *dlqGiveUp) print(
	cmd *cobra.Command, t *outbox.Table, id string, failure error, within time.Duration,
) error {
	r := struct {
		Outbox string `json:"outbox"`
		RowID  string `json:"row_id"`
		Result string `json:"result"`
		Error  string `json:"error,omitempty"`
		Hint   string `json:"hint,omitempty"`
	}{Outbox: t.String(), RowID: id, Result: "given up"}
	if failure != nil {
		r.Result, r.Error, r.Hint = "left", oneLine(failure.Error()), hint.Of(failure)
	}
	w := cmd.OutOrStdout()
	var err error
	switch {
	case c.json:
		err = printJSON(w, r)
	case failure == nil:
		_, err = fmt.Fprintf(w, "gave up row %s of %s: the relay tries it once more within %s, "+
			"and makes it a dead letter if that fails\n", id, t, formatDuration(within))
	default:
		_, err = fmt.Fprintf(w, "left row %s of %s: %s\n", id, t, r.Error)
		if r.Hint != "" {
			fmt.Fprintf(w, "    hint: %s\n", r.Hint)
		}
	}
	return err
}

// chooseOutbox is the outbox of a name. Without a name it is the only one.
func chooseOutbox(cfg *Config, name string) (*outbox.Table, error) {
	tables, err := cfg.Tables()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, t := range tables {
		if name == t.String() || name == t.Name || name == "" && len(tables) == 1 {
			return t, nil
		}
		names = append(names, t.String())
	}
	if name == "" {
		return nil, &usageError{hint.Errorf("--outbox "+strings.Join(names, ", or --outbox "),
			"the relay has %d outboxes: which one?", len(tables))}
	}
	return nil, &usageError{hint.Errorf("the outboxes are "+strings.Join(names, ", "),
		"%q is none of the relay's outboxes", name)}
}
