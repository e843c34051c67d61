package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"
)

// drawn is what a terminal shows after text, as far as the demo steers it.
func drawn(text string) string {
	lines, y := []string{""}, 0
	for i := 0; i < len(text); {
		switch rest := text[i:]; {
		case strings.HasPrefix(rest, "\x1b[A"):
			y, i = y-1, i+3
		case strings.HasPrefix(rest, "\x1b[J"):
			lines, i = append(lines[:y], ""), i+3
		case strings.HasPrefix(rest, "\x1b[K"):
			i += 3
		case rest[0] == '\r':
			lines[y], i = "", i+1
		case rest[0] == '\n':
			y, i = y+1, i+1
			if y == len(lines) {
				lines = append(lines, "")
			}
		default:
			lines[y], i = lines[y]+rest[:1], i+1
		}
	}
	return strings.Join(lines, "\n")
}

func TestBlock(t *testing.T) {
	var out bytes.Buffer
	s := &screen{live: true, out: &out, err: &out}
	s.println("first")
	s.block([]string{"a", "b"})
	s.block([]string{"c", "d", "e"})
	s.logger().Warn("careful", zap.Int("n", 1))
	if got, want := drawn(out.String()), "first\nwarn relay careful {\"n\": 1}\nc\nd\ne\n"; got != want {
		t.Errorf("drawn\n%s\nwant\n%s", got, want)
	}
	s.block([]string{"f"})
	s.clear()
	s.println("last")
	if got := drawn(out.String()); !strings.HasSuffix(got, "{\"n\": 1}\nlast\n") {
		t.Errorf("drawn\n%s", got)
	}
}

// Where nothing can be replaced no escape sequence is written either.
func TestNoTerminal(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out, &out)
	s.working("waiting")
	s.show(snapshot{options: options{duration: time.Second}, elapsed: time.Second})
	s.summary(verdict{}, snapshot{elapsed: time.Second}, percentiles{})
	s.clear()
	if strings.ContainsAny(out.String(), "\x1b\r") || strings.Contains(out.String(), "waiting") {
		t.Errorf("%q", out.String())
	}
}

func TestOneReplicaIsSaidByTheSummary(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out, &out)
	s.logger().Warn("the stream has one replica", zap.String("code", "stream-one-replica"))
	if out.Len() > 0 {
		t.Errorf("%q", out.String())
	}
}

// Everything fits into 80 columns, with the numbers of ten minutes on a busy disk.
func TestWidth(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, err: &out}
	n := snapshot{
		options: options{duration: 10 * time.Minute, rate: 1000}, elapsed: 10 * time.Minute,
		events: 720_000, transactions: 600_000, rolledBack: 31_000,
		counts:  counts{stored: 720_000},
		latency: percentiles{99 * time.Millisecond, 999 * time.Millisecond, 9 * time.Second},
	}
	s.intro(n.options)
	s.summary(verdict{committed: n.events, stored: n.events, aggregates: 120_000, unknown: 1, recorded: 1, latency: n.latency}, n, n.latency)
	s.println(s.panel(n)...)
	for line := range strings.Lines(out.String()) {
		if w := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); w > 80 {
			t.Errorf("%d columns: %s", w, line)
		}
	}
}

func TestClip(t *testing.T) {
	for _, c := range []struct {
		in, want string
		width    int
	}{
		{"abc", "abc", 3},
		{"abcd", "abc\x1b[m", 3},
		{"\x1b[1mab\x1b[mc", "\x1b[1mab\x1b[mc", 3},
		{"\x1b[1mäöü\x1b[mc", "\x1b[1mäöü\x1b[m\x1b[m", 3},
	} {
		if got := clip(c.in, c.width); got != c.want {
			t.Errorf("clip(%q, %d) = %q, want %q", c.in, c.width, got, c.want)
		}
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000", -100: "-100"} {
		if got := thousands(n); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	if got := printable("a\x1b[2Jb\u009bé\n"); got != "a?[2Jb?é?" {
		t.Error(got)
	}
}
