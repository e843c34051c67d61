package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
)

const (
	// replayAsks is from how many rows on a replay is confirmed.
	replayAsks = 100_000
	// replayCounts bounds the counting, and replayCountFor the time for it.
	replayCounts   = 10_000_000
	replayCountFor = time.Minute
)

// replayCommand is `walpost replay`: which rows, and what to do.
type replayCommand struct {
	ids, eventTypes                       []string
	aggregate, tenant, since, until, from string
	toStream                              string
	all, dryRun, yes, noWait, json        bool
}

// replayFilters are the flags that choose rows.
var replayFilters = []string{"id", "event-type", "aggregate", "tenant", "since", "until"}

func newReplayCommand() *cobra.Command {
	c := &replayCommand{}
	cmd := &cobra.Command{
		Use: "replay {FLAGS | --all}", Short: "Have the relay publish delivered rows again",
		Long: help("replay"), Args: noSuchCommand, RunE: c.run,
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&c.ids, "id", nil, "the row of this id (repeatable)")
	flags.StringArrayVar(&c.eventTypes, "event-type", nil, "rows of this event type (repeatable)")
	flags.StringVar(&c.aggregate, "aggregate", "",
		"of the aggregates TYPE, or of the one TYPE/ID (the type ends at the first slash)")
	flags.StringVar(&c.tenant, "tenant", "", "of this tenant id")
	flags.StringVar(&c.since, "since", "", "delivered at this time (RFC 3339) or so long ago (72h), or later")
	flags.StringVar(&c.until, "until", "", "delivered before this time, or longer ago")
	flags.StringVar(&c.from, "outbox", "", "from this table, where the relay has several")
	flags.StringVar(&c.toStream, "to-stream", "", "publish into this stream instead of the relay's")
	flags.BoolVar(&c.all, "all", false, "every delivered row")
	flags.BoolVar(&c.dryRun, "dry-run", false, "only count the rows, by event type")
	flags.BoolVar(&c.yes, "yes", false, "do not ask")
	flags.BoolVar(&c.noWait, "no-wait", false, "do not wait for the end")
	flags.BoolVar(&c.json, "json", false, "write JSON")
	addConfigFlags(cmd)
	cmd.AddCommand(newReplayListCommand(), newReplayCancelCommand())
	return cmd
}

func (c *replayCommand) run(cmd *cobra.Command, _ []string) error {
	choice, err := c.choice(cmd)
	if err != nil {
		return err
	}
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	t, err := c.table(cfg)
	if err == nil && c.toStream != "" {
		err = c.checkStream(cmd.Context(), cfg)
	}
	if err != nil {
		return err
	}
	db, err := openLook(cmd.Context(), cfg, "walpost replay")
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.InspectDelivered(cmd.Context(), t); err != nil {
		return err
	}
	return c.request(cmd, db, t, &table.Replay{
		Slot: cfg.Postgres.Slot, Outbox: t.String(), ReplayChoice: choice, ToStream: orNull(c.toStream),
	})
}

// choice checks the flags that choose rows.
func (c *replayCommand) choice(cmd *cobra.Command) (f table.ReplayChoice, err error) {
	given := 0
	for _, name := range replayFilters {
		flag := cmd.Flags().Lookup(name)
		if !flag.Changed {
			continue
		}
		given++
		// A shell's unset variable must not choose all of them.
		if v := flag.Value.String(); v == "" || strings.Contains(","+strings.Trim(v, "[]")+",", ",,") {
			return f, &usageError{hint.Errorf("leave the flag out where it is not meant",
				"--%s is empty", name)}
		}
	}
	switch {
	case given == 0 && !c.all:
		return f, &usageError{hint.Errorf("give flags such as --event-type or --since, or --all; "+
			"--dry-run counts the rows", "walpost replay: which rows?")}
	case given > 0 && c.all:
		return f, &usageError{hint.Errorf("leave one of them out", "--all excludes other choices")}
	}
	f.IDs, f.EventTypes, f.TenantID = c.ids, c.eventTypes, orNull(c.tenant)
	f.SetAggregate(c.aggregate)
	if f.Since, err = timeFlag("since", c.since); err == nil {
		f.Until, err = timeFlag("until", c.until)
	}
	if err == nil && f.Since != nil && f.Until != nil && !f.Since.Before(*f.Until) {
		err = &usageError{fmt.Errorf("--since %s is not before --until %s", c.since, c.until)}
	}
	return f, err
}

// timeFlag reads a time, or how long ago it was.
func timeFlag(flag, text string) (*time.Time, error) {
	if text == "" {
		return nil, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err == nil {
		return &at, nil
	}
	var ago time.Duration
	if err := age(&ago, flag, text); err != nil {
		return nil, &usageError{hint.Errorf("as in 2026-01-31T12:00:00Z or 72h",
			"--%s: %q is neither a time nor a duration", flag, text)}
	}
	at = time.Now().Add(-ago)
	return &at, nil
}

// table is the outbox that is meant.
func (c *replayCommand) table(cfg *Config) (*outbox.Table, error) {
	t, err := chooseOutbox(cfg, c.from)
	if err != nil {
		return nil, err
	}
	return t, table.CheckReplayable(t)
}

// checkStream refuses a stream that the relay cannot publish into.
func (c *replayCommand) checkStream(ctx context.Context, cfg *Config) error {
	own := cfg.NATS.Stream
	cfg.NATS.Stream = c.toStream
	defer func() { cfg.NATS.Stream = own }()
	s, _, done, err := openStream(ctx, cfg, "walpost replay")
	if err != nil {
		return err
	}
	defer done()
	info, err := s.Info(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return hint.Errorf(fmt.Sprintf("create it first: nats stream add %s --subjects '%s.>' --defaults",
			c.toStream, strings.ToLower(c.toStream)), "publish into stream %s: %w", c.toStream, err)
	}
	if err != nil {
		return err
	}
	prefix, err := relay.ReplayPrefix(own, info)
	if err == nil {
		_, err = publish.NewTemplate(prefix + "." + cfg.NATS.Subject)
	}
	return err
}

// request counts the rows, asks where they are many, and writes the request.
func (c *replayCommand) request(cmd *cobra.Command, db *table.DB, t *outbox.Table, r *table.Replay) error {
	ctx := cmd.Context()
	if err := db.Limit(ctx, replayCountFor); err != nil {
		return err
	}
	types, err := db.CountReplay(ctx, t, r.ReplayChoice, replayCounts)
	if err != nil && (c.dryRun || pg.Code(err) != pgerrcode.QueryCanceled) {
		return adviseCount(err)
	}
	total := int64(0)
	for _, x := range types {
		total += x.Rows
	}
	known := err == nil && total < replayCounts
	if c.dryRun {
		return c.printCounts(cmd, types, total)
	}
	if known && total == 0 {
		return hint.Errorf("only delivered rows are published again; --dry-run counts them",
			"no delivered row of %s is meant", t)
	}
	if known {
		r.Total = &total
	}
	if err := c.confirm(cmd, total, known); err != nil {
		return err
	}
	holder, err := db.LockHolder(ctx)
	if err != nil {
		return err
	}
	if r.ID, err = db.RequestReplay(ctx, r); err != nil {
		return err
	}
	if holder == nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "note: no relay of slot %s runs: replay %d waits for one\n",
			r.Slot, r.ID)
	}
	if c.noWait || holder == nil {
		return c.printEnd(cmd, db, r.ID)
	}
	if err := watchReplay(ctx, cmd.ErrOrStderr(), db, r.ID); err != nil || ctx.Err() != nil {
		return err
	}
	return c.printEnd(cmd, db, r.ID)
}

func adviseCount(err error) error {
	switch {
	case pg.Code(err) == pgerrcode.QueryCanceled:
		return hint.Wrap(err, "it takes more than a minute: narrow it with --since or --id")
	case pg.InClass(err, pg.DataException) && hint.Of(err) == "":
		return hint.Wrap(err, "--id takes ids as the table has them")
	}
	return err
}

// rowsText is a number of rows; known is false where counting them ended early.
func rowsText(total int64, known bool) string {
	switch {
	case known:
		return count(int(total), "row")
	case total == 0:
		return "rows that could not be counted within a minute"
	}
	return strconv.FormatInt(total, 10) + " rows or more"
}

// confirm asks before many rows are published.
func (c *replayCommand) confirm(cmd *cobra.Command, total int64, known bool) error {
	if c.yes || known && total <= replayAsks {
		return nil
	}
	text := rowsText(total, known)
	if _, terminal := terminalWidth(cmd.InOrStdin()); !terminal {
		return &usageError{hint.Errorf("add --yes, perhaps after a look with --dry-run",
			"publish %s again: there is no terminal to ask on, and nothing was requested", text)}
	}
	to := "the relay's stream"
	if c.toStream != "" {
		to = "stream " + c.toStream
	}
	if !confirmed(cmd, fmt.Sprintf("Publish %s again into %s?", text, to)) {
		return errors.New("nothing was requested")
	}
	return nil
}
