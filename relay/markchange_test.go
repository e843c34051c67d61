package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// markSetting is a mark as a configuration names it, on the canonical table with a status.
type markSetting struct {
	name   string
	mark   outbox.Mark
	status bool
	bare   bool // the layout has the columns of the event only
}

var markSettings = []markSetting{
	{name: "update", mark: outbox.MarkUpdate},
	{name: "delete", mark: outbox.MarkDelete},
	{name: "journal", mark: outbox.MarkJournal},
	{name: "set", mark: outbox.MarkUpdate, status: true},
	{name: "delete by columns", mark: outbox.MarkDelete, bare: true},
}

func (m markSetting) table() *outbox.Table {
	layout := outbox.Canonical()
	if m.bare {
		for f := outbox.AvailableAt; f < outbox.NumFields; f++ {
			layout.Columns[f] = ""
		}
	}
	if m.status {
		layout.SetStatus("status", [outbox.NumStates]string{outbox.Done: "2"})
	}
	if m.mark == outbox.MarkJournal {
		layout = layout.Journaled()
	}
	return &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: layout, Mark: m.mark}
}

// forgets reports whether a relay with another mark would take the delivered rows for pending ones.
func (m markSetting) forgets(to markSetting) bool {
	stays := m.mark == outbox.MarkUpdate || m.mark == outbox.MarkJournal
	inJournal := m.mark == outbox.MarkJournal || to.mark == outbox.MarkJournal
	return stays && (inJournal || to.status)
}

// TestChangeOfMark: a start with another mark is refused where it would deliver rows again, and changes nothing. What the
// hints name makes it possible. No row comes twice then, and none is lost.
func TestChangeOfMark(t *testing.T) {
	t.Parallel()
	type change struct {
		mode     relay.Mode
		from, to markSetting
	}
	var all []change
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		for _, from := range markSettings {
			for _, to := range markSettings {
				if to.bare && from.mark != outbox.MarkJournal || from.bare {
					continue // nothing tells such a relay of a mark in the row
				}
				if from != to {
					all = append(all, change{mode, from, to})
				}
			}
		}
	}
	for _, c := range testenv.Some(t, 9, all...) {
		t.Run(fmt.Sprintf("%s/%s to %s", c.mode, c.from.name, c.to.name), func(t *testing.T) {
			t.Parallel()
			changeMark(t, c.mode, c.from, c.to)
		})
	}
}

func changeMark(t *testing.T, mode relay.Mode, from, to markSetting) {
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Mode, r.cfg.FallbackInterval = mode, 100*time.Millisecond
	r.exec(`ALTER TABLE outbox_messages ADD status int NOT NULL DEFAULT 0`)
	deliver := func(m markSetting, first, last, all int) {
		t.Helper()
		r.cfg.Outboxes = []*outbox.Table{m.table()}
		x := r.begin()
		r.put(first, last)
		eventually(t, "the rows are stored", func() bool { return int(r.storedCount()) >= last-all })
		x.halt()
		x.quiet("missed_rows")
		r.storedIs(all+1, last)
	}
	if from.mark == outbox.MarkJournal {
		r.appendOnly(from)
	}
	deliver(from, 1, 20, 0)
	if to.mark == outbox.MarkJournal {
		r.appendOnly(to)
	}
	rows := r.query1(`SELECT count(*) || coalesce(sum(hashtext(o::text)), 0)::text FROM outbox_messages o`)

	r.cfg.Outboxes = []*outbox.Table{to.table()}
	if from.forgets(to) {
		r.refused("table-other-marks")
		r.storedIs(1, 20)
	}
	if from.mark == outbox.MarkJournal && !to.bare {
		r.refused("table-refuses-update")
	}
	if !from.forgets(to) {
		r.begin().halt()
		if now := r.query1(`SELECT count(*) || coalesce(sum(hashtext(o::text)), 0)::text FROM outbox_messages o`); now != rows {
			t.Errorf("the start has changed delivered rows: %s, and was %s", now, rows)
		}
	}
	deliver(to, 21, 30, 0)
	r.purge()
	deliver(to, 31, 40, 30)
}

func (r *rig) appendOnly(m markSetting) {
	r.t.Helper()
	r.exec(strings.Join(table.AppendOnlySQL(m.table(), "public."+table.AppendOnly), ";"))
}

// refused has a start refused, and then does what the hint names.
func (r *rig) refused(code string) {
	r.t.Helper()
	x := r.start()
	eventually(r.t, "the start is refused", func() bool {
		select {
		case <-x.done:
			return true
		default:
			if x.Status().State == "streaming" || x.Status().State == "polling" {
				r.t.Fatalf("the relay delivers, and was to be refused with %s", code)
			}
			return false
		}
	})
	if got := hint.CodeOf(x.err); got != code {
		r.t.Fatalf("refused with %q, want %s: %v", got, code, x.err)
	}
	advice := hint.Of(x.err)
	for _, before := range []string{"owner: ", "archive them, and then "} {
		if _, after, ok := strings.Cut(advice, before); ok {
			advice = after
		}
	}
	advice, _, _ = strings.Cut(advice, ", or ")
	r.exec(advice)
}

func (r *rig) purge() {
	r.t.Helper()
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(r.t.Context()))
}
