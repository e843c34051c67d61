package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const indent = "  "

// label begins a line.
func (s *screen) label(name string) string { return indent + s.bold(pad(name, 12)) }

func (s *screen) intro(o options) {
	s.println(s.bold("walpost demo")+": a shop commits "+thousands(o.rate)+" transactions per second "+
		"for "+o.duration.String()+".",
		"Each event it writes to its outbox has to arrive in NATS JetStream, once.", "")
}

func (s *screen) ready(workspace string) {
	s.println(s.label("files")+workspace+", removed at the end", "")
}

// working is what is being done while there is nothing else to see.
func (s *screen) working(text string) { s.block([]string{indent + s.dim(text+" ...")}) }

// show draws the load, or prints a line of it.
func (s *screen) show(n snapshot) {
	if s.live {
		s.block(s.panel(n))
		return
	}
	s.println(s.line(n))
}

func (s *screen) panel(n snapshot) []string {
	return []string{
		indent + s.bar(n),
		"",
		s.figure("committed", n.events, n.commitsText()),
		s.figure("stored", n.counts.stored, "of them, as a consumer of the stream sees"),
		s.figure("lag", n.lag(), "on their way"),
		s.fault("lost", n.counts.missing, "") + s.bold("duplicated  ") + s.faults(n.counts.duplicated) +
			s.bold("   reordered  ") + s.faults(n.counts.reordered),
		"",
		s.label("latency") + s.latency(n.latency) + s.dim("  commit to PubAck"),
	}
}

// bar shows how much of the time is over.
func (s *screen) bar(n snapshot) string {
	const width = 40
	full := min(width, int(width*n.elapsed/n.duration))
	return s.green(strings.Repeat("━", full)) + s.dim(strings.Repeat("─", width-full)) +
		fmt.Sprintf("  %s of %s", n.elapsed.Truncate(time.Second), n.duration)
}

func (s *screen) figure(name string, n int, text string) string {
	return s.label(name) + pad(thousands(n), -10) + indent + s.dim(text)
}

func (s *screen) faults(n int) string {
	if n == 0 {
		return s.green("0")
	}
	return s.red(thousands(n))
}

func (s *screen) latency(p percentiles) string {
	return fmt.Sprintf("p50 %s  p99 %s  max %s",
		milliseconds(p.p50), milliseconds(p.p99), milliseconds(p.max))
}

func (s *screen) line(n snapshot) string {
	return fmt.Sprintf("%4s  committed %d  stored %d  lag %d  p50 %s  p99 %s  "+
		"lost %d  duplicated %d  reordered %d",
		n.elapsed.Truncate(time.Second), n.events, n.counts.stored, n.lag(),
		milliseconds(n.latency.p50), milliseconds(n.latency.p99),
		n.counts.missing, n.counts.duplicated, n.counts.reordered)
}

// lag is what is committed and not seen in the stream yet.
func (n *snapshot) lag() int { return max(0, n.events-n.counts.stored) }

func (n *snapshot) perSecond() int { return int(float64(n.transactions)/n.elapsed.Seconds() + 0.5) }

func (n *snapshot) commitsText() string {
	return fmt.Sprintf("events, %s commits (%s/s), %s rolled back",
		thousands(n.transactions), thousands(n.perSecond()), thousands(n.rolledBack))
}

// summary is the verdict, for people.
func (s *screen) summary(v verdict, n snapshot, commits percentiles) {
	s.clear()
	if !s.live {
		s.println("")
	}
	lines := []string{
		"The whole stream, read from its beginning and compared with the table:",
		"",
		s.figure("committed", v.committed, n.commitsText()),
		s.figure("stored", v.stored, "of them, each as it is in the table"),
		s.fault("lost", v.lost, "committed and not in the stream"),
		s.fault("duplicated", v.duplicated, "stored once more"),
		s.fault("reordered", v.reordered,
			fmt.Sprintf("behind a later event of its order (%s orders)", thousands(v.aggregates))),
	}
	if v.unknown > 0 {
		lines = append(lines, s.fault("unknown", v.unknown, "messages that no committed row has made"))
	}
	if v.recorded > 0 {
		lines = append(lines, s.heldBack(v))
	}
	s.println(append(lines,
		"",
		s.label("latency")+s.latency(v.latency),
		s.note("from the commit to the PubAck, over every event. The commit's own"),
		s.note("fsync is in it: COMMIT takes the shop p50 "+milliseconds(commits.p50)+
			", p99 "+milliseconds(commits.p99)+"."),
		s.note("JetStream keeps one copy and syncs it every 2m, its default."),
		"")...)
}

func (s *screen) heldBack(v verdict) string {
	return s.figure("held back", v.recorded, "delayed, or the reason stands in their last_error")
}

// again is for the count after the events that were inserted by hand.
func (s *screen) again(v verdict) {
	if v.recorded > 0 {
		s.println(s.heldBack(v), "")
	}
}

func (s *screen) fault(name string, n int, text string) string {
	blank := strings.Repeat(" ", max(0, 10-len(thousands(n))))
	return s.label(name) + blank + s.faults(n) + indent + s.dim(text)
}

func (s *screen) note(text string) string { return s.label("") + s.dim(text) }

// thousands is a number that can be read.
func thousands(n int) string {
	t := strconv.Itoa(n)
	for i := len(t) - 3; i > 0 && t[i-1] != '-'; i -= 3 {
		t = t[:i] + "," + t[i:]
	}
	return t
}
