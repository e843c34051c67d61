package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// TestTailOnATerminal: aligned, as wide as the terminal, and nothing that it would act on.
func TestTailOnATerminal(t *testing.T) {
	master, terminal := pty(t, 80)
	table := newEventTable(terminal)
	at := time.Date(2026, 11, 20, 23, 59, 59, 123456789, time.FixedZone("", 3600))
	event := func(seq uint64, eventType, payload string) jetstream.Received {
		return jetstream.Received{
			Seq: seq, At: at, Relayed: true, Type: eventType, AggregateType: "order", AggregateID: "42", TenantID: "7",
			Row: outbox.MessageID{ID: "1"}, Payload: []byte(payload),
		}
	}
	other := jetstream.Received{Seq: 11, At: at.Add(2 * time.Hour), Subject: "events.\x1b[2J", Payload: []byte(strings.Repeat("ü", 200))}
	polled := event(10, "order.placed.twice", "{\n\t\"a\":\n 1}")
	polled.Polled = true
	for _, m := range []jetstream.Received{event(9, "order.placed", "\x1b[31m\a"+strings.Repeat("x", 100)), polled, other} {
		if err := table.print(m); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"2026-11-20, times in UTC",
		"TIME             SEQ  EVENT TYPE    AGGREGATE   TENANT  ROW   PAYLOAD",
		`22:59:59.123       9  order.placed  order/42    7       1     \u001b[31m\u0007x…`,
		`22:59:59.123      10  order.placed…  order/42    7       1     [via poll] {"a":…`,
		"2026-11-21, times in UTC",
		`00:59:59.123      11  -              -           -       -     [other writer, s…`,
	}
	if !strings.Contains(help("tail"), "\n    "+want[1]+"\n") {
		t.Error("the manual shows another heading")
	}
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(master) // which ends with EIO
	got := strings.Split(strings.TrimSuffix(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n"), "\n")
	if !slices.Equal(got, want) {
		t.Errorf("printed\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestColours: on a terminal only, and not where NO_COLOR is set.
func TestColours(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	shown := func(print func(w io.Writer)) string {
		master, terminal := pty(t, 80)
		print(&screen{w: terminal})
		if err := terminal.Close(); err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(master) // which ends with EIO
		return string(text)
	}
	warn := func(w io.Writer) { paint(w, red, "error") }
	if got := shown(warn); got != "\x1b[31merror\x1b[0m" {
		t.Errorf("on a terminal: %q", got)
	}
	var elsewhere strings.Builder
	if warn(&elsewhere); elsewhere.String() != "error" {
		t.Errorf("elsewhere: %q", &elsewhere)
	}
	t.Setenv("NO_COLOR", "1")
	if got := shown(warn); got != "error" {
		t.Errorf("with NO_COLOR: %q", got)
	}
}

// TestColouredLog: the levels have colours, and what others wrote has none.
func TestColouredLog(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	master, terminal := pty(t, 80)
	log, err := newLogger(LogConfig{Level: "info", Format: "auto"}, &screen{w: terminal})
	if err != nil {
		t.Fatal(err)
	}
	log.Warn("a\tb\x1b[2J\u009b", zap.Error(errors.New("\u202e\x1b[31m\xff")))
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(master)
	_, got, _ := strings.Cut(string(text), "\t")
	want := "\x1b[33mWARN\x1b[0m\ta\tb\\u001b[2J\\u009b\t" + `{"error": "\u202e\u001b[31m\ufffd"}` + "\r\n"
	if got != want {
		t.Errorf("logged %q, want %q", got, want)
	}
}

// TestIsUnread: a pipe is unread when its reader has closed it, a file never.
func TestIsUnread(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer write.Close()
	if isUnread(&screen{w: write}) {
		t.Error("a pipe with a reader is unread")
	}
	_ = read.Close()
	if !isUnread(&screen{w: write}) {
		t.Error("a pipe without a reader is not unread")
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if isUnread(null) || isUnread(&strings.Builder{}) {
		t.Error("what is no pipe is unread")
	}
}

// pty is a terminal of so many columns.
func pty(t *testing.T, columns uint16) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("open a terminal, which every Linux has: %v", err)
	}
	t.Cleanup(func() { _ = master.Close() })
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns})
	}
	if err == nil {
		terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return master, terminal
}
