package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/publish"
)

const tailHelp = `Shows the events of nats.stream, one a line, as they are stored there: from now on, or from what was stored so
long ago (--since), until SIGINT or SIGTERM. PostgreSQL is not asked.

    walpost tail
    walpost tail order.placed 'payment.*' --since 10m
    walpost tail --json | jq .payload

An event type may end in *, which stands for whatever follows, dots too; quote it, or the shell may take it for files. Messages
of other writers than a relay are shown, too, and said to be such; where event types are given they are left out. Where
nats.subject says the event type, only subjects of these types are asked for: events that were stored under another nats.subject
are not found then.

A line has the time at which the event was stored (UTC), its sequence, event type, aggregate (type/id), tenant, and the row's
id; then [via poll] where the table delivered it; and the payload. On a terminal it is as wide as that, elsewhere it has the
whole payload.

With --json: sequence, stored, subject, id (the ce-id), source, type, aggregate_type, aggregate_id, tenant_id, version (of the
event), aggregate_version, time, trace, via (wal, poll where the table delivered it, or null: another writer), position (of the
lane), commit (where the WAL has a row that had to wait), outbox, row_id, and payload (as JSON where it is JSON, else as a
string) of each. What is not known is null. A payload that is no text is in payload_base64 instead. All but sequence and payload
are strings.

While NATS or the stream's leader is away it waits, and says so on standard error; then it goes on, with nothing left out and
nothing shown twice. It acknowledges nothing and changes nothing, and its consumer is deleted in the end (half a minute later
where it was killed). The user of nats.url needs to be allowed

    publish:   $JS.API.STREAM.INFO.<stream>            subscribe: _INBOX.>, or what nats.inbox_prefix says
               $JS.API.CONSUMER.CREATE.<stream>.>
               $JS.API.CONSUMER.MSG.NEXT.<stream>.>
               $JS.API.CONSUMER.DELETE.<stream>.>`

func newTailCommand() *cobra.Command {
	var since string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "tail [EVENT_TYPE...]", Short: "Follow the stream's events as they arrive", Long: tailHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			types, err := publish.ParseTypes(args)
			if err != nil {
				return &usageError{err}
			}
			var window time.Duration
			if err := age(&window, "since", since); err != nil {
				return err
			}
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			print := newEventTable(cmd.OutOrStdout()).print
			if asJSON {
				print = func(m jetstream.Received) error { return printJSON(cmd.OutOrStdout(), asObject(m)) }
			}
			return tail(cmd.Context(), cfg, types, window, cmd.ErrOrStderr(), print)
		},
	}
	cmd.Flags().StringVar(&since, "since", "", "begin with what was stored so long ago, as in 90m or 72h")
	cmd.Flags().BoolVar(&asJSON, "json", false, "write JSON")
	addConfigFlags(cmd)
	return cmd
}

// tail prints the events of the types until ctx is done.
func tail(
	ctx context.Context, cfg *Config, types publish.Types, since time.Duration, stderr io.Writer, print func(jetstream.Received) error,
) error {
	s, template, done, err := openStream(ctx, cfg, "walpost tail")
	if err != nil {
		return err
	}
	defer done()
	info, err := s.Info(ctx)
	if err != nil {
		return adviseTail(s, cfg, err)
	}
	from := info.LastSeq + 1
	if since > 0 {
		if from, err = s.SeqSince(ctx, time.Now().Add(-since)); err != nil {
			return adviseTail(s, cfg, err)
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
	return adviseTail(s, cfg, err)
}

// adviseTail names all that tail needs at once, and not only what was missed first.
func adviseTail(s *jetstream.Stream, cfg *Config, err error) error {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return err
	}
	inbox, name := cmp.Or(cfg.NATS.InboxPrefix, "_INBOX"), cfg.NATS.Stream
	return hint.Wrap(err, fmt.Sprintf("let the user publish on %s, %s, %s and %s, and subscribe to %s.>",
		s.APISubject("STREAM.INFO."+name), s.APISubject("CONSUMER.CREATE."+name+".>"),
		s.APISubject("CONSUMER.MSG.NEXT."+name+".>"), s.APISubject("CONSUMER.DELETE."+name+".>"), inbox))
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
