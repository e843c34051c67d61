package fallback

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// batchBytes bounds the payloads that are read at once, as the table keeps them.
const batchBytes = 1 << 20

// polled is a row of the table in the publisher.
type polled struct {
	*pass
	attempts int
}

// FailedAttempts implements PolledWaiter.
func (p *polled) FailedAttempts() int { return p.attempts }

// batch is how many rows are read at once: at most so many, and not many large
// ones.
func batch(cs []table.Candidate, most int) int {
	n := 0
	for bytes := 0; n < min(len(cs), most); n++ {
		if bytes += cs[n].Bytes; bytes > batchBytes && n > 0 {
			break
		}
	}
	return n
}

// deliver reads rows and sends them, in the order of their ids. It returns how many
// of them it has dealt with: not all, where they are large.
func (l *Poller) deliver(
	ctx context.Context, t *outbox.Table, p *pass, cs []table.Candidate,
) (n int, err error) {
	ids := make([]string, len(cs))
	for i, c := range cs {
		ids[i] = c.ID
	}
	fetched, err := l.db.Fetch(ctx, t, ids, l.publisher.MostPayload())
	if err != nil {
		return 0, err
	}
	cs, ids = cs[:fetched.N], ids[:fetched.N]
	rows := fetched.Rows
	if err := l.findLocked(ctx, t, p, ids, fetched); err != nil {
		return 0, err
	}
	asked, err := l.askRecords(ctx, t, rows...)
	if err != nil {
		return 0, err
	}
	byID := map[string][]*outbox.Event{} // more than one where ids are not unique
	for _, ev := range rows {
		id := string(ev.Values[outbox.ID])
		byID[id] = append(byID[id], ev)
	}
	for _, c := range cs {
		of := Aggregate{t, c.Aggregate}
		if slices.ContainsFunc(p.locked, func(ref outbox.Ref) bool { return ref.ID == c.ID }) {
			p.blocked[of] = of.Ordered()
		}
		if c.Early {
			p.blocked[of] = of.Ordered()
		}
		if err := fetched.Unreadable[c.ID]; err != nil && !c.Early && !p.waits(of, c.Recorded) {
			if err := l.parkUnreadable(ctx, p, t, c, err); err != nil {
				return 0, err
			}
		}
		if len(byID[c.ID]) == 0 || c.Early || p.waits(of, c.Recorded) {
			continue
		}
		ev := listed(byID[c.ID], c, of)
		if ev == nil {
			p.blocked[of] = of.Ordered() // it was recorded after it was listed
			continue
		}
		if err := l.send(ctx, p, ev, c.Scheduled, asked); err != nil {
			return 0, err
		}
	}
	return len(cs), l.publisher.Flush()
}

// listed is the one of the rows of an id that is still as it was listed.
func listed(rows []*outbox.Event, c table.Candidate, of Aggregate) *outbox.Event {
	for _, ev := range rows {
		recorded := table.IsRecorded(ev)
		same := recorded == c.Recorded && (!recorded || attemptsOf(ev) == c.Attempts)
		if same && (len(rows) == 1 || AggregateOf(ev) == of) {
			return ev
		}
	}
	return nil
}

// askRecords asks the table which rows' aggregates have records, where only it can tell.
func (l *Poller) askRecords(ctx context.Context, t *outbox.Table, rows ...*outbox.Event) (AsOf, error) {
	if l.cfg.OnPoison == Skip || !l.holds.Any() {
		return 0, nil
	}
	return l.holds.Ask(rows, func(rows []*outbox.Event) ([]bool, error) {
		return l.db.HaveRecords(ctx, t, rows)
	})
}

// isHeld reports whether a row waits behind a failed one. asked is when the table was asked.
func (l *Poller) isHeld(ctx context.Context, ev *outbox.Event, asked AsOf) (bool, error) {
	if l.cfg.OnPoison == Skip {
		return false, nil
	}
	of := AggregateOf(ev)
	v := l.holds.check(of, asked)
	for ; v == IsUnknown; v = l.holds.check(of, asked) {
		var err error
		if asked, err = l.askRecords(ctx, ev.Table, ev); err != nil {
			return false, err
		}
	}
	return v == IsHeld, nil
}

// findLocked notes which of the rows that could not be read are locked.
func (l *Poller) findLocked(
	ctx context.Context, t *outbox.Table, p *pass, ids []string, f table.Fetched,
) error {
	got := map[string]bool{}
	for _, ev := range f.Rows {
		got[string(ev.Values[outbox.ID])] = true
	}
	for id := range f.Unreadable {
		got[id] = true
	}
	if len(got) == len(ids) {
		return nil
	}
	missing := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return got[id] })
	pending, err := l.db.StillPending(ctx, t, missing)
	for _, id := range pending {
		p.locked = append(p.locked, outbox.Ref{Table: t, ID: id})
	}
	return err
}

// send hands one row to the publisher, or to the marker where that is its place.
func (l *Poller) send(ctx context.Context, p *pass, ev *outbox.Event, scheduled bool, asked AsOf) error {
	of := AggregateOf(ev)
	row := table.RowOf(ev)
	row.Polled, row.Attempts = true, attemptsOf(ev)
	recorded := table.IsRecorded(ev)
	if table.Journals(row.Ref.Table) {
		if id, err := strconv.ParseInt(row.Ref.ID, 10, 64); err == nil {
			l.moved.TakeID(row.Ref.Table, id)
		}
	}
	if behind, stored, err := l.recovered.StoredBefore(ctx, ev, recorded); err != nil {
		return err
	} else if stored {
		p.add()
		return l.marker.Stored(ctx, row, behind, p) // it was read in the stream
	}
	if row.Ref.Table.Partitioned {
		if !l.moved.takeFromTable(row.Ref, p.moved) {
			return nil // moved into another partition just now: the WAL has brought it
		}
		defer l.moved.sent(row.Ref)
	}
	if !recorded {
		held, err := l.isHeld(ctx, ev, asked)
		if err != nil {
			return err
		}
		if held {
			l.holds.BeginRecord(of)
			p.add()
			return l.marker.Hold(ctx, row, of, p)
		}
	}
	if recorded && l.wal != nil {
		l.holds.queueRows(of)
	}
	p.add()
	err := l.publisher.SendPolled(ctx, ev, &polled{p, row.Attempts})
	var failure *outbox.RowError
	switch {
	case errors.As(err, &failure):
		row.Failure = failure.Error()
		if l.cfg.OnPoison != Skip && of.Ordered() {
			p.fail(of, recorded)
		}
		l.reporter.Refused(row.Ref, string(ev.Values[outbox.EventType]), failure)
		return l.marker.Park(ctx, row, of, p)
	case err != nil:
		return err
	}
	crash.At("polled")
	p.sent = true
	if recorded {
		p.recorded[of] = true
	}
	if !l.leads(ev.Table) && !recorded && !scheduled {
		p.missed = append(p.missed, row.Ref.ID)
	}
	return nil
}

// parkUnreadable records the failure of a row that the server cannot send. The search has found
// its id and its aggregate, which is all that a record needs.
func (l *Poller) parkUnreadable(
	ctx context.Context, p *pass, t *outbox.Table, c table.Candidate, why error,
) error {
	of := Aggregate{t, c.Aggregate}
	failure := &outbox.RowError{
		Class: outbox.RowUnreadable, Reason: fmt.Sprintf("the database cannot send the row: %+.200q", why),
	}
	row := table.Row{
		Ref: outbox.Ref{Table: t, ID: c.ID, Hash: outbox.UnknownHash}, Failure: failure.Error(),
		Polled: c.Recorded, Attempts: c.Attempts,
	}
	if l.cfg.OnPoison != Skip && of.Ordered() {
		p.fail(of, c.Recorded)
	}
	p.add()
	l.reporter.Refused(row.Ref, "", failure)
	return l.marker.Park(ctx, row, of, p)
}

func attemptsOf(ev *outbox.Event) int {
	n, _ := strconv.Atoi(string(ev.Values[outbox.Attempts]))
	return n
}
