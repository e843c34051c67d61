package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
)

const dlqHelp = `Dead letters are rows that could not be delivered: each was moved whole from its outbox to the table
` + fallback.DeadLetters + `, with its last error. Nothing ever deletes them but these commands.

    walpost dlq list --class subject
    walpost dlq show 17
    walpost dlq retry --event-type order.placed --dry-run
    walpost dlq discard 17 18

The commands only change rows: what is retried is delivered by the relay that runs, or by the next one that does. With --json each
writes one JSON object a line. The role of postgres.url needs SELECT on the dead letters; DELETE too for retry and discard; and for
retry SELECT and INSERT on the outbox, with DELETE where its mark is none.`

const dlqListHelp = `Lists dead letters, oldest first: those with the ids that are given, or those that all of the flags apply to, or all.

With --json: dead_letter_id, outbox, row_id, event_type, tenant_id, aggregate_type, aggregate_id, attempts, failed_at and last_error
of each, without a limit unless --limit is given; what is not known is null.`

const dlqShowHelp = `Shows one dead letter, with every column of the row that it was. With --json: what list writes, the payload (as JSON where it
is JSON, else as a string), and the row as the table keeps it in "original".

A value of more than 1 MiB is not read: its length stands in its place, with the query that reads it. In JSON the payload is null
then. So is an original of more than 4 MiB, and "original_bytes" has its length.`

const dlqRetryHelp = `Puts rows back into their outboxes, under their own ids and with every value as it was, but due at once, without attempts and
with a last_error that says so, and deletes their dead letters in the same transaction, 250 at a time. Remove first what they died of: a row that still cannot be sent
dies again.

A row comes back behind what was committed meanwhile, also of its own aggregate. It is the same event, with the same message id.

A dead letter is left where it is if its id is in the outbox again, its outbox is not configured, the table lacks one of its columns,
or refuses the row. It is reported, the others go on, and the exit code is 1. After an interruption some are back and the others
still dead: run it again. Dead letters that come while it runs are not retried. Those that are left count against --limit, too.

With --json: dead_letter_id, outbox, row_id and result (retried, left or missing) of each, and error and hint where it was left.
--dry-run does the same and takes it back.`

const dlqDiscardHelp = `Deletes dead letters for good, 250 in a transaction. On a terminal it asks first; elsewhere it needs --yes.

With --json: dead_letter_id, outbox, row_id and result (discarded or missing) of each. --dry-run does the same and takes it back.`

func newDLQCommand() *cobra.Command {
	return newGroup("dlq", "List, show, retry and discard dead letters", dlqHelp,
		newDLQListCommand(), newDLQShowCommand(), newDLQRetryCommand(), newDLQDiscardCommand())
}

func newDLQListCommand() *cobra.Command {
	var choice dlqChoice
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list [DEAD_LETTER_ID...]", Short: "List dead letters, oldest first", Long: dlqListHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := choice.filter(cmd, args)
			if err != nil {
				return err
			}
			if asJSON && !cmd.Flags().Changed("limit") {
				f.Limit = 0 // nothing would tell that there is more
			}
			return withDLQ(cmd, func(ctx context.Context, q *deadletter.Queue) error {
				if asJSON {
					return q.List(ctx, f, func(l deadletter.Letter) error {
						l.FailedAt = l.FailedAt.UTC()
						return printJSON(cmd.OutOrStdout(), l)
					})
				}
				return listLetters(ctx, cmd.OutOrStdout(), q, f)
			})
		},
	}
	choice.addFlags(cmd, 50)
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

func newDLQShowCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show DEAD_LETTER_ID", Short: "Show one dead letter", Long: dlqShowHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := parseIDs(args)
			if err == nil && len(ids) != 1 {
				err = &usageError{hint.Errorf("`walpost dlq list` shows the ids", "%s takes one dead letter id, got %d", cmd.CommandPath(), len(ids))}
			}
			if err != nil {
				return err
			}
			return withDLQ(cmd, func(ctx context.Context, q *deadletter.Queue) error {
				l, err := q.Show(ctx, ids[0])
				if err != nil {
					return err
				}
				return showLetter(cmd.OutOrStdout(), l, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

// withDLQ connects as the configuration says.
func withDLQ(cmd *cobra.Command, do func(context.Context, *deadletter.Queue) error) error {
	cfg, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	q, err := deadletter.Open(cmd.Context(), deadletter.Config{
		Config:      database(cfg, "walpost dlq"),
		Publication: cfg.Postgres.Publication,
		Outboxes:    tables,
	})
	if err != nil {
		return err
	}
	defer q.Close()
	return do(cmd.Context(), q)
}

func parseIDs(args []string) ([]int64, error) {
	var ids []int64
	for _, a := range args {
		id, err := strconv.ParseInt(a, 10, 64)
		if err != nil || id < 1 {
			return nil, &usageError{hint.Errorf("`walpost dlq list` shows the ids, in the first column", "%q is not a dead letter id", a)}
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
