package drill

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// lookUpRows is how many rows are looked for in one statement.
const lookUpRows = 1000

// counting is the events beside their messages.
type counting struct {
	d        *Drill
	events   []event
	messages []message
	stored   map[int]bool // events that have a message
	absent   map[int]bool // events whose row the promoted server lacks
	pending  map[int]bool // events that are not stored yet, as their rows say
}

// see takes the messages that the stream has now.
func (c *counting) see(messages []message) {
	c.messages, c.stored = messages, map[int]bool{}
	for _, m := range messages {
		c.stored[m.n] = true
		delete(c.pending, m.n)
	}
}

// misses tells whether an event is neither stored nor pending.
func (c *counting) misses() bool {
	return slices.ContainsFunc(c.events, func(e event) bool {
		return !c.stored[e.n] && !c.pending[e.n] && !c.absent[e.n] && !e.doubtful
	})
}

// findRows asks the table about the events that are not stored, and after a failover about all.
func (c *counting) findRows(ctx context.Context) error {
	c.absent, c.pending = map[int]bool{}, map[int]bool{}
	var asked []event
	for _, e := range c.events {
		if e.id != "" && (c.d.report.Failover != nil || !c.stored[e.n]) {
			asked = append(asked, e)
		}
	}
	t := c.d.cfg.Outboxes[0]
	for part := range slices.Chunk(asked, lookUpRows) {
		err := c.d.query(ctx, func(db *table.DB) error { return c.lookUp(ctx, db, t, part) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *counting) lookUp(ctx context.Context, db *table.DB, t *outbox.Table, asked []event) error {
	ids := make([]string, len(asked))
	for i, e := range asked {
		ids[i] = e.id
	}
	waiting, err := db.StillPending(ctx, t, ids)
	if err != nil {
		return err
	}
	here := map[int]bool{}
	if c.d.report.Failover != nil {
		if here, err = c.present(ctx, db, t, ids); err != nil {
			return err
		}
	}
	for _, e := range asked {
		if c.d.report.Failover != nil && !here[e.n] {
			c.absent[e.n] = true
		} else if !c.stored[e.n] && slices.Contains(waiting, e.id) {
			c.pending[e.n] = true
		}
	}
	return nil
}

// present tells which events have their rows. An id of a row that a failover has lost may be another row's by
// now.
func (c *counting) present(
	ctx context.Context, db *table.DB, t *outbox.Table, ids []string,
) (map[int]bool, error) {
	here := map[int]bool{}
	sql := fmt.Sprintf(`SELECT concat(t.%s) FROM %s t WHERE t.%s = ANY ($1::text[]::%s[])`,
		t.Column(outbox.Payload), t.SQL(), t.Column(outbox.ID), t.IDType)
	err := db.QueryText(ctx, sql, []any{ids}, func(v [][]byte) error {
		if n, own := c.d.load.read(v[0]); own {
			here[n] = true
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	return here, nil
}

// compare has the fault rig's comparison count.
func (c *counting) compare() {
	t, e := c.d.cfg.Outboxes[0], &c.d.report.Events
	var rows []audit.Row
	for _, ev := range c.events {
		switch {
		case ev.doubtful && !c.stored[ev.n]:
			e.InDoubt++
			continue
		case c.absent[ev.n]:
			if !ev.doubtful {
				c.d.report.Failover.Lost++
			}
			continue
		case c.pending[ev.n]:
			e.Pending++
		default:
			ref := outbox.Ref{Table: t, ID: strconv.Itoa(ev.n)}
			rows = append(rows, audit.Row{Ref: ref, Aggregate: c.d.load.aggregate(ev.n), Order: int64(ev.n)})
		}
		e.Committed++
	}
	var messages []audit.Message
	phantoms := map[int]bool{}
	for _, m := range c.messages {
		if c.absent[m.n] && !phantoms[m.n] {
			phantoms[m.n] = true
			continue
		}
		id := outbox.MessageID{Table: t.String(), ID: strconv.Itoa(m.n)}
		messages = append(messages, audit.Message{Seq: m.Seq, Own: true, ID: id, Position: m.Position})
	}
	found := audit.Compare(rows, messages)
	e.Lost, e.Duplicated, e.Reordered = found.Lost.Count, found.Duplicated.Count, found.Reordered.Count
	e.Duplicated += found.Unknown.Count // only an absent event that came again is of no row
	e.Stored = e.Committed - e.Pending - e.Lost
	if c.d.report.Failover != nil {
		c.d.report.Failover.Phantoms = len(phantoms)
	}
	names := strings.NewReplacer(t.String()+"/", "event ", fmt.Sprintf("/%016x", 0), "")
	for _, x := range slices.Concat(found.Lost.First, found.Duplicated.First, found.Reordered.First) {
		e.Examples = append(e.Examples, names.Replace(x))
	}
}

// times measures from the beginning of the fault.
func (c *counting) times() {
	r, w := c.d.report, c.d.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	again := w.first
	if c.d.cfg.Rate > 0 {
		again = time.Time{}
	}
	for _, e := range c.events {
		at, stored := w.stored[e.n]
		if !stored || c.absent[e.n] {
			continue
		}
		r.Longest = max(r.Longest, seconds(at.Sub(e.committed)))
		isLater := !w.broken.IsZero() && e.committed.After(w.broken)
		if isLater && (again.IsZero() || at.Before(again)) {
			again = at
		}
	}
	if r.Injected == nil || again.IsZero() {
		return
	}
	r.Again = since(*r.Injected, again)
	if c.d.cfg.Rate == 0 || !r.Recovered {
		return
	}
	caught := again
	for _, e := range c.events {
		if at, stored := w.stored[e.n]; stored && !e.committed.After(again) && at.After(caught) {
			caught = at
		}
	}
	r.CaughtUp = since(*r.Injected, caught)
}

func since(begun, end time.Time) *Seconds {
	s := seconds(end.Sub(begun))
	return &s
}
