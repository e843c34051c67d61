package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/table"
)

// TestReplayProgress: a bar that is drawn over itself on a terminal, and lines elsewhere.
func TestReplayProgress(t *testing.T) {
	total := int64(1000)
	show := func(p *replayProgress) {
		p.show(&table.Replay{ID: 7, State: table.ReplayRequested, Total: &total})
		p.show(&table.Replay{ID: 7, State: table.ReplayRunning, Total: &total, Sent: 490, Refused: 10})
		p.show(&table.Replay{ID: 7, State: table.ReplayDone, Total: &total, Sent: 990, Refused: 10})
		p.end()
	}
	master, terminal := pty(t, 80)
	show(&replayProgress{w: terminal, bar: 10, begun: time.Now().Add(-time.Second)})
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	drawn, _ := io.ReadAll(master)
	for _, want := range []string{"\r\x1b[Kreplay 7 [          ] waiting for the relay", "[=====     ] 500 of 1000 rows, ", " left", "[==========] 1000 of 1000 rows, "} {
		if !strings.Contains(string(drawn), want) {
			t.Errorf("drawn %q, want %q", drawn, want)
		}
	}
	var plain strings.Builder
	show(&replayProgress{w: &plain, begun: time.Now().Add(-time.Second), every: time.Hour})
	lines := strings.Split(plain.String(), "\n")
	if len(lines) != 3 || lines[0] != "replay 7: waiting for the relay" || !strings.HasPrefix(lines[1], "replay 7: 1000 of 1000 rows, ") {
		t.Errorf("printed %q", lines)
	}
}

// TestManyRowsAreAskedFor: on a terminal, where only a yes is one.
func TestManyRowsAreAskedFor(t *testing.T) {
	for answer, want := range map[string]bool{"y\n": true, "YES\n": true, "n\n": false, "\n": false, "yes please\n": false} {
		master, terminal := pty(t, 80)
		if _, err := io.WriteString(master, answer); err != nil {
			t.Fatal(err)
		}
		var asked strings.Builder
		cmd := &cobra.Command{}
		cmd.SetContext(t.Context())
		cmd.SetIn(terminal)
		cmd.SetErr(&asked)
		err := (&replayCommand{toStream: "REBUILT"}).confirm(cmd, 10_000_000, false)
		if (err == nil) != want || asked.String() != "Publish 10000000 rows or more again into stream REBUILT? [y/N] " {
			t.Errorf("%q: %v, asked %q", answer, err, asked.String())
		}
		_ = terminal.Close()
		_ = master.Close()
	}
}
