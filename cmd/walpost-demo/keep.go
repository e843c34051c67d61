package main

import (
	"bufio"
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/nats-io/nats.go/jetstream"
)

// keep leaves everything running and shows each event that arrives, until ctx is
// done. A line break on stdin has the shop commit one transaction more.
func (r *round) keep(ctx context.Context, stdin io.Reader) error {
	r.acks.drain() // everything was acknowledged before it was counted
	stop, err := follow(ctx, r.env.js, jetstream.DeliverNewPolicy, r.arrived)
	if err != nil {
		return err
	}
	defer stop()
	r.invite()
	asked := make(chan struct{})
	go readLines(ctx, stdin, asked)
	for {
		select {
		case <-ctx.Done():
			r.screen.println("")
			return nil
		case <-asked:
			if err := r.shop.sell(ctx, r.shop.conns[0]); err != nil {
				return err
			}
		}
	}
}

// readLines ends with stdin, or with the process.
func readLines(ctx context.Context, stdin io.Reader, asked chan<- struct{}) {
	for lines := bufio.NewScanner(stdin); lines.Scan(); {
		select {
		case asked <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

// invite says how to try it by hand.
func (r *round) invite() {
	s := r.screen
	s.println("", "Everything keeps running, and the shop rests:", "",
		s.label("PostgreSQL")+r.env.url,
		s.label("NATS")+r.env.nats.URL()+"  stream "+streamName, "")
	psql := findPSQL(r.env.pg.Binaries().Dir)
	if psql == "" {
		s.println("There is no psql on this machine. Press Enter here, and the shop commits an event,",
			"or insert one with any other client. They arrive below; Ctrl-C ends it.", "")
		return
	}
	s.println("Insert an event, from another terminal:", "",
		indent+psql+" '"+r.env.url+"' -c \"",
		indent+"  INSERT INTO outbox_messages",
		indent+"    (aggregate_type, aggregate_id, event_type, payload)",
		indent+"  VALUES ('order', 1, 'order.returned',",
		indent+"    jsonb_build_object('note', 'too small'))\"", "",
		"or press Enter here, and the shop commits one. Each event that arrives is shown",
		"below, with the time from its commit to its PubAck. Ctrl-C ends it.", "")
}

// findPSQL is psql as a shell finds it, or with its directory, or "".
func findPSQL(bin string) string {
	if _, err := exec.LookPath("psql"); err == nil {
		return "psql"
	}
	if path, err := exec.LookPath(filepath.Join(bin, "psql")); err == nil {
		return path
	}
	return ""
}

// arrived shows one message. Acknowledgements come in the stream's order, so the
// next one is this message's.
func (r *round) arrived(m jetstream.Msg) {
	latency := "?"
	select {
	case d := <-r.acks.recent:
		latency = milliseconds(d)
	case <-time.After(time.Second):
	}
	s, c := r.screen, contentOf(m)
	line := indent + time.Now().Format("15:04:05.000") +
		indent + s.bold(printable(c.eventType)) + indent + printable(c.aggregate) +
		indent + s.green(latency) + indent + s.dim(printable(c.payload))
	s.println(clip(line, s.width()))
}

// printable keeps an event from steering the terminal.
func printable(t string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, t)
}
