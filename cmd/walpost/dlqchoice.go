package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// dlqChoice is what the command line says about which dead letters are meant.
type dlqChoice struct {
	eventType, aggregate, tenant, outbox, class, olderThan, newerThan string
	limit                                                             int
}

var dlqFilters = []string{"event-type", "aggregate", "tenant", "outbox", "class", "older-than", "newer-than"}

func (c *dlqChoice) addFlags(cmd *cobra.Command, limit int) {
	flags := cmd.Flags()
	flags.StringVar(&c.eventType, "event-type", "", "of this event type")
	flags.StringVar(&c.aggregate, "aggregate", "",
		"of the aggregates TYPE, or of the one TYPE/ID (the type ends at the first slash)")
	flags.StringVar(&c.tenant, "tenant", "", "of this tenant id")
	flags.StringVar(&c.outbox, "outbox", "", "from this table, with its schema (default public)")
	flags.StringVar(&c.class, "class", "",
		"of this class of errors: what stands before the colon (subject, size, ...)")
	flags.StringVar(&c.olderThan, "older-than", "", "dead for at least so long, as in 90m or 72h")
	flags.StringVar(&c.newerThan, "newer-than", "", "dead for less than that")
	flags.IntVar(&c.limit, "limit", limit, "at most so many, the oldest; 0 is no limit")
}

// given tells whether any flag narrows the choice.
func (c *dlqChoice) given(cmd *cobra.Command) (names []string) {
	for _, name := range dlqFilters {
		if cmd.Flags().Changed(name) {
			names = append(names, "--"+name)
		}
	}
	return names
}

func (c *dlqChoice) filter(cmd *cobra.Command, args []string) (f deadletter.Filter, err error) {
	ids, err := parseIDs(args)
	if err != nil {
		return f, err
	}
	given := c.given(cmd)
	for _, flag := range given {
		// A shell's unset variable must not choose all of them.
		if cmd.Flags().Lookup(flag[2:]).Value.String() == "" {
			return f, &usageError{hint.Errorf("leave the flag out where it is not meant",
				"%s is empty", flag)}
		}
	}
	if len(ids) > 0 && cmd.Flags().Changed("limit") {
		given = append(given, "--limit")
	}
	if len(ids) > 0 && len(given) > 0 {
		return f, &usageError{hint.Errorf("give one of the two",
			"dead letter ids and %s exclude each other", strings.Join(given, ", "))}
	}
	if c.class != "" && !slices.Contains(outbox.RowClasses, c.class) {
		return f, &usageError{hint.Errorf(didYouMean(c.class, outbox.RowClasses),
			"--class: %q is none of %s", c.class, strings.Join(outbox.RowClasses, ", "))}
	}
	if c.limit < 0 {
		return f, &usageError{fmt.Errorf("--limit: %d is negative", c.limit)}
	}
	f = deadletter.Filter{
		IDs: ids, EventType: c.eventType, TenantID: c.tenant, Class: c.class, Limit: c.limit,
	}
	if len(ids) > 0 {
		f.Limit = 0
	}
	var one bool
	f.AggregateType, f.AggregateID, one = strings.Cut(c.aggregate, "/")
	if one && (f.AggregateType == "" || f.AggregateID == "") {
		return f, &usageError{hint.Errorf("give TYPE or TYPE/ID",
			"--aggregate: %q lacks a part", c.aggregate)}
	}
	return f, errors.Join(c.table(&f),
		age(&f.OlderThan, "older-than", c.olderThan), age(&f.NewerThan, "newer-than", c.newerThan))
}

func (c *dlqChoice) table(f *deadletter.Filter) error {
	if c.outbox == "" {
		return nil
	}
	schema, name, err := outbox.ParseTable(c.outbox)
	if err != nil {
		return &usageError{fmt.Errorf("--outbox: %w", err)}
	}
	f.Outbox = schema + "." + name
	return nil
}

func age(d *time.Duration, flag, text string) error {
	if text == "" {
		return nil
	}
	if err := (durationValue{p: d}).Set(text); err != nil {
		return &usageError{fmt.Errorf("--%s: %w", flag, err)}
	}
	if *d <= 0 {
		return &usageError{fmt.Errorf("--%s: %s is not a time since then", flag, text)}
	}
	return nil
}
