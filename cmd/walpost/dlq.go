package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
)

func newDLQCommand() *cobra.Command {
	return newGroup("dlq", "List, show, retry and discard dead letters", help("dlq"),
		newDLQListCommand(), newDLQShowCommand(), newDLQRetryCommand(), newDLQDiscardCommand(),
		newDLQGiveUpCommand())
}

func newDLQListCommand() *cobra.Command {
	var choice dlqChoice
	var asJSON, parked bool
	cmd := &cobra.Command{
		Use: "list [DEAD_LETTER_ID...]", Short: "List dead letters, oldest first", Long: help("dlq list"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if parked {
				return choice.listParked(cmd, args, asJSON)
			}
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
				last := ""
				if len(args) == 0 && len(choice.given(cmd)) == 0 {
					last = pointToParked(cmd)
				}
				return listLetters(ctx, cmd.OutOrStdout(), q, f, last)
			})
		},
	}
	choice.addFlags(cmd, 50)
	cmd.Flags().BoolVar(&parked, "parked", false,
		"list the rows that failed and wait in their outboxes, and not dead letters")
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

func newDLQShowCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show DEAD_LETTER_ID", Short: "Show one dead letter", Long: help("dlq show"),
		Args: oneArg("dead letter id", "`walpost dlq list` shows the ids"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := parseIDs(args)
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
		Config:   database(cfg, "walpost dlq"),
		Outboxes: tables,
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
			return nil, &usageError{hint.Errorf("`walpost dlq list` shows the ids, in the first column",
				"%q is not a dead letter id", a)}
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
