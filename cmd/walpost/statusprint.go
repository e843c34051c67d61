package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

// sheet writes a report for people, a label and its text a line.
type sheet struct{ w io.Writer }

func (s sheet) line(label, format string, args ...any) {
	fmt.Fprintf(s.w, "%-16s  %s\n", label, escape(fmt.Sprintf(format, args...)))
}

// note prints the advice on a separate line.
func (s sheet) note(text, advice string) {
	fmt.Fprintf(s.w, "note: %s\n", escape(text))
	if advice != "" {
		fmt.Fprintf(s.w, "    hint: %s\n", escape(advice))
	}
}

func printIndented(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func printStatus(w io.Writer, r *status.Report, cfg *Config, asJSON bool) error {
	if asJSON {
		return printIndented(w, r)
	}
	s := sheet{w}
	if r.Server == nil {
		s.line("server", "PostgreSQL could not be asked")
	} else {
		s.server(r.Server)
		s.relay(r.Relay, r.Stream != nil)
		s.slots(r.Slot, r.NewSlot, cfg.Postgres.MaxRetainedWAL)
		for _, o := range r.Outboxes {
			s.outbox(o, cfg.Fallback.Interval)
		}
		s.line("dead letters", "%s%s", counted(r.DeadLetters), lettersOf(r))
		if r.Replay != nil {
			s.replay(r.Replay)
		}
	}
	if r.Stream == nil {
		s.line("stream", "%s: NATS could not be asked", cfg.NATS.Stream)
	} else {
		s.stream(r.Stream)
	}
	if r.Relay != nil && r.Relay.SlotShared {
		s.note("the relay that holds the lock has other outboxes or another stream: "+
			"it does not deliver what this configuration names",
			"configure both with the same outboxes and stream; if they have none of the same rows, give "+
				"each its own postgres.slot, nats.stream and nats.subject")
	}
	for _, u := range r.Unread {
		s.note("not read: "+u.Error, u.Hint)
	}
	if r.Relay != nil && r.Relay.Lock == nil && r.Slot != nil && r.Slot.Streamed() {
		s.note(fmt.Sprintf("process %d streams slot %s and holds no lock: it is no relay, "+
			"or one that has just lost its connection", *r.Slot.ActivePID, r.Slot.Name), "")
	}
	return nil
}

func (s sheet) server(r *pg.Server) {
	kind := ""
	if r.Standby {
		kind = "; it is a standby, and relays work on its primary"
	}
	s.line("server", "PostgreSQL %s, database %s%s", r.Version, r.Database, kind)
}

// relay says what PostgreSQL tells of the relay, whose walsender works on while it waits for NATS.
func (s sheet) relay(r *status.Relay, nats bool) {
	switch {
	case r == nil:
		s.line("relay", "not known")
		return
	case r.Lock == nil:
		s.line("relay", "none: nobody holds the lock, and nothing is relayed")
	case !nats:
		s.line("relay", "holds the lock; NATS could not be asked, so it may deliver nothing")
	case r.Mode == "stream":
		s.line("relay", "streams")
	default:
		s.line("relay", "polls, or prepares to stream: nothing streams the slot")
	}
	if r.Lock != nil {
		s.line("  lock", "%s", sessionText(r.Lock))
	}
	s.line("  standing by", "%s", counted(r.StandingBy))
}

func (s sheet) replay(r *table.Replay) {
	of := "rows that were not counted"
	if r.Total != nil {
		of = count(int(*r.Total), "row")
	}
	into := ""
	if r.ToStream != nil {
		into = ", into stream " + *r.ToStream
	}
	s.line("replay", "%d of %s is %s: %d of %s%s", r.ID, r.Outbox, r.State, r.Sent+r.Refused, of, into)
}

// sessionText names a server process.
func sessionText(p *pg.Session) string {
	text := fmt.Sprintf("process %d", p.PID)
	if p.Application != "" {
		text += ", " + p.Application
	}
	if p.User != "" {
		text += " (role " + p.User + ")"
	}
	if p.Client != nil {
		text += " from " + *p.Client
	}
	if p.Since != nil {
		text += ", connected " + moment(*p.Since)
	}
	return text
}

// moment is a time and how long ago that was, by this machine's clock.
func moment(t time.Time) string {
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format(time.RFC3339), since(max(0, time.Since(t))))
}

func (s sheet) slots(slot, fresh *status.Slot, budget int64) {
	if slot == nil {
		s.line("slot", "not known")
		return
	}
	s.slot("slot", slot, budget)
	if fresh != nil {
		s.slot("slot being made", fresh, 0)
	}
}

// slot prints a slot, of which the relay lets at most budget bytes of WAL be kept; 0 is any.
func (s sheet) slot(label string, slot *status.Slot, budget int64) {
	if !slot.Exists {
		s.line(label, "%s: does not exist", slot.Name)
		return
	}
	s.line(label, "%s: %s", slot.Name, strings.Join(slotTraits(slot.SlotState), ", "))
	if slot.Walsender != nil {
		s.line("  in use by", "%s", sessionText(slot.Walsender))
	} else if slot.ActivePID != nil {
		s.line("  in use by", "process %d", *slot.ActivePID)
	} else {
		s.line("  in use by", "nobody")
	}
	s.line("  WAL", "%s: %s", slot.WALStatus, keptWAL(slot.SlotState, budget))
	switch {
	case slot.Confirmed != "":
		s.line("  confirmed", "%s, %s behind", slot.Confirmed, roughSize(slot.ConfirmedLag))
	case slot.Type == "logical":
		s.line("  confirmed", "nothing: it is being created, and waits for others' transactions")
	}
}

// keptWAL says how much is kept, of how much, in the units of the budget's key.
func keptWAL(slot *pg.SlotState, budget int64) string {
	size := roughSize
	if limit := formatSize(budget); budget > 0 && !strings.HasSuffix(limit, "iB") {
		size = roughDecimal
	}
	text := size(slot.Retained) + " kept"
	switch {
	case budget > 0:
		text += " of " + formatSize(budget) + " (postgres.max_retained_wal)"
	case slot.Safe < 0:
		text += ", no limit"
	}
	if slot.Safe >= 0 {
		text += ", " + size(slot.Safe) + " until it is lost"
	}
	return text
}

// slotTraits are a slot's kind, and what is out of the ordinary.
func slotTraits(s *pg.SlotState) []string {
	traits := []string{s.Type}
	if s.Plugin != "" {
		traits = []string{s.Plugin, "database " + s.Database}
	}
	for _, t := range []struct {
		has  bool
		text string
	}{
		{s.Temporary, "temporary"},
		{s.TwoPhase, "two_phase"},
		{s.Failover, "failover"},
		{s.Synced, "synchronised from the primary"},
		{s.Invalidation != "", "invalidated: " + s.Invalidation},
	} {
		if t.has {
			traits = append(traits, t.text)
		}
	}
	return traits
}

// outbox prints an outbox, which the relay searches once in an interval.
func (s sheet) outbox(o *status.Outbox, interval time.Duration) {
	known := ""
	if o.Name != "" {
		known = ", known as " + o.Name
	}
	s.line("outbox", "%s%s, mark %s", o.Table, known, o.Mark)
	s.line("  pending", "%s%s", counted(o.Pending), oldest(o))
	switch {
	case !o.Records:
		s.line("  failed", "the layout records no failures: such rows are dead letters")
	case o.Parked == nil:
		s.line("  failed", "not known")
	default:
		s.line("  failed", "%s parked, %s held%s", counted(o.Parked), counted(o.Held), whereParked(o))
	}
	if o.Progress != nil {
		s.line("  journal", "%s, holes: %d", settledTo(o.Progress, interval), o.Progress.Holes)
	}
}

// settledTo says how far a journal's progress is. It follows the deliveries after one search or two, and so a
// distance from the newest id is no lag.
func settledTo(p *table.Progress, interval time.Duration) string {
	if p.Behind == 0 {
		return fmt.Sprintf("settled up to id %d, the newest", p.SettledTo)
	}
	return fmt.Sprintf("settled up to id %d of %d (follows the deliveries at the next searches, every %s)",
		p.SettledTo, p.SettledTo+p.Behind, formatDuration(interval))
}

func whereParked(o *status.Outbox) string {
	if *o.Parked == 0 {
		return ""
	}
	return ": see `walpost dlq list --parked`"
}

func oldest(o *status.Outbox) string {
	switch {
	case !o.Dates:
		return "; their age is not known: the layout maps neither occurred_at nor available_at"
	case o.OldestDueAge == nil:
		return ""
	case *o.OldestDueAge == 0:
		return ", none due"
	}
	return ", the oldest due for " + since(time.Duration(*o.OldestDueAge*float64(time.Second)))
}

// lettersOf says of which outboxes the dead letters are, unless all are of the only one that is configured.
func lettersOf(r *status.Report) string {
	configured := map[string]bool{}
	for _, o := range r.Outboxes {
		configured[cmp.Or(o.Name, o.Table)] = true
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r.DeadLettersOf)) {
		part := fmt.Sprintf("%d of %s", r.DeadLettersOf[name], name)
		if !configured[name] {
			part += " (not configured here)"
		} else if len(configured) == 1 && len(r.DeadLettersOf) == 1 {
			return ""
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return ""
	}
	return ": " + strings.Join(parts, ", ")
}

// counted is a number that was counted up to countMost.
func counted(n *int) string {
	switch {
	case n == nil:
		return "not known"
	case *n >= countMost:
		return fmt.Sprintf("at least %d", *n)
	}
	return fmt.Sprint(*n)
}

func (s sheet) stream(st *status.Stream) {
	if !st.Exists {
		s.line("stream", "%s: does not exist", st.Name)
		return
	}
	s.line("stream", "%s, created %s", st.Name, moment(st.Created))
	s.line("  messages", "%d, %s, sequences %d to %d",
		st.Messages, roughSize(int64(st.Bytes)), st.FirstSeq, st.LastSeq)
	if st.LastMessage != nil {
		s.line("  last message", "%s", moment(*st.LastMessage))
	}
	replicas := count(st.Replicas, "replica")
	if st.Leader != nil {
		replicas += ", led by " + *st.Leader
	}
	s.line("  kept on", "%s", replicas)
	batches := "none"
	if len(st.Batches) > 0 {
		batches = strings.Join(st.Batches, ", ")
	}
	s.line("  takes", "batches: %s; duplicate window %s", batches,
		formatDuration(time.Duration(st.DuplicateWindow*float64(time.Second))))
}

// roughSize is a size to three digits.
func roughSize(n int64) string { return rough(n, 1024, "B", "KiB", "MiB", "GiB", "TiB") }

func roughDecimal(n int64) string { return rough(n, 1000, "B", "KB", "MB", "GB", "TB") }

func rough(n int64, base float64, units ...string) string {
	f, i := float64(n), 0
	for ; f >= 1000 && i < len(units)-1; i++ {
		f /= base
	}
	if i == 0 || f >= 100 {
		return fmt.Sprintf("%.0f%s", f, units[i])
	}
	return fmt.Sprintf("%.1f%s", f, units[i])
}
