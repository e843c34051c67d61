package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/publish"
)

func newTailCommand() *cobra.Command {
	var since string
	var from uint64
	var asJSON bool
	cmd := &cobra.Command{
		Use: "tail [EVENT_TYPE...]", Short: "Follow the stream's events as they arrive", Long: help("tail"),
		RunE: func(cmd *cobra.Command, args []string) error {
			types, err := publish.ParseTypes(args)
			if err != nil {
				return &usageError{err}
			}
			var window time.Duration
			if err := age(&window, "since", since); err != nil {
				return err
			}
			if from > 0 && window > 0 {
				return &usageError{hint.Errorf("leave one of them out", "--from excludes --since")}
			}
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			print := newEventTable(cmd.OutOrStdout()).print
			if asJSON {
				print = func(m jetstream.Received) error { return printJSON(cmd.OutOrStdout(), asObject(m)) }
			}
			ctx, cancel := whileRead(cmd.Context(), cmd.OutOrStdout())
			defer cancel()
			return tail(ctx, cfg, types, from, window, cmd.ErrOrStderr(), print)
		},
	}
	cmd.Flags().Uint64Var(&from, "from", 0, "begin with this stream sequence, or the first one behind it")
	cmd.Flags().StringVar(&since, "since", "", "begin with what was stored so long ago, as in 90m or 72h")
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

// whileRead returns a context that ends when nothing reads out any more, as where the program that reads it
// was killed. A write would notice that, too, but the next event may come hours later.
func whileRead(ctx context.Context, out io.Writer) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for sleep.For(ctx, time.Second) {
			if isUnread(out) {
				cancel()
			}
		}
	}()
	return ctx, cancel
}

// tail prints the events of the types until ctx is done.
func tail(
	ctx context.Context, cfg *Config, types publish.Types, from uint64, since time.Duration, stderr io.Writer,
	print func(jetstream.Received) error,
) error {
	s, template, done, err := openStream(ctx, cfg, "walpost tail")
	if err != nil {
		return err
	}
	defer done()
	info, err := s.Info(ctx)
	if err != nil {
		return s.ExplainFollow(err)
	}
	switch {
	case from == 0 && since == 0:
		from = info.LastSeq + 1
	case since > 0:
		if from, err = s.SeqSince(ctx, time.Now().Add(-since)); err != nil {
			return s.ExplainFollow(err)
		}
	}
	fmt.Fprintf(stderr, "following stream %s from sequence %d on\n", cfg.NATS.Stream, from)
	err = s.Follow(ctx, jetstream.FollowOptions{
		From: from, Filters: template.Filters(&info.Config, types), Waiting: tellWaiting(stderr),
	}, func(m jetstream.Received) error {
		if len(types) > 0 && (!m.Relayed || !types.Match(m.Type)) {
			return nil
		}
		return print(m)
	})
	return s.ExplainFollow(err)
}

// tellWaiting says once a minute why nothing comes, and when it goes on.
func tellWaiting(w io.Writer) func(error) {
	var told time.Time
	return func(err error) {
		switch {
		case err == nil && !told.IsZero():
			told = time.Time{}
			fmt.Fprintln(w, "going on")
		case err != nil && time.Since(told) > time.Minute:
			told = time.Now()
			fmt.Fprintf(w, "waiting: %s\n", oneLine(err.Error()))
		}
	}
}
