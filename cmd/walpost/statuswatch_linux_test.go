package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/testenv"
)

// TestStatusWatch: reports follow each other, show what changes, outlast a server that is away, and end with the context and
// exit code 0.
func TestStatusWatch(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	o := newOffice(t, testenv.SharedPostgres(t), n, "{table: public.outbox_messages}")
	o.walpost("migrate", "up")

	lines, end := o.watch("--json")
	var r status.Report
	next := func() {
		t.Helper()
		r = status.Report{}
		o.must(json.Unmarshal([]byte(<-lines), &r))
	}
	next()
	equal(t, "pending", number(r.Outboxes[0].Pending), "0")
	o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.one', '{}')`)
	for number(r.Outboxes[0].Pending) != "1" {
		next()
	}
	o.must(n.Stop(t.Context()))
	for len(r.Errors) == 0 {
		next()
	}
	equal(t, "the server that is away", r.Errors[0].Server, "nats")
	equal(t, "pending then", number(r.Outboxes[0].Pending), "1")
	if errs := end(); !strings.Contains(errs, "error: connect to NATS") {
		t.Errorf("standard error has %q", errs)
	}

	lines, end = o.watch()
	heads := 0
	for line := range lines {
		if regexp.MustCompile(`^at +20\S+Z, every 2s until Ctrl-C$`).MatchString(line) {
			if heads++; heads == 2 {
				break
			}
		}
	}
	end()

	master, terminal := pty(t, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	go func() {
		ended <- execute(ctx, []string{"status", "--watch", "--config", o.config}, terminal, terminal)
		_ = terminal.Close()
	}()
	var shown strings.Builder
	out := bufio.NewReader(master)
	for strings.Count(shown.String(), "\x1b[H\x1b[2Jat ") < 2 {
		b, err := out.ReadByte()
		o.must(err)
		shown.WriteByte(b)
	}
	cancel()
	_, _ = io.Copy(io.Discard, out) // which ends with EIO
	equal(t, "exit code", <-ended, 0)
}

// watch runs the command until end is called. It gives the lines of standard output.
func (o *office) watch(flags ...string) (lines <-chan string, end func() string) {
	ctx, cancel := context.WithCancel(o.t.Context())
	read, write := io.Pipe()
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- execute(ctx, append([]string{"status", "--watch", "--config", o.config}, flags...), write, &stderr)
		_ = write.Close()
	}()
	all := make(chan string)
	go func() {
		defer close(all)
		for s := bufio.NewScanner(read); s.Scan(); {
			all <- s.Text()
		}
	}()
	return all, func() string {
		cancel()
		for range all {
			continue
		}
		equal(o.t, "exit code", <-ended, 0)
		return stderr.String()
	}
}
