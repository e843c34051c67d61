package console

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// alarmFor is for how long an alarm counts as active after it was raised: as in the rule WalpostAlarm.
const alarmFor = 15 * time.Minute

// raisedAlarm is an alarm that a relay has raised.
type raisedAlarm struct {
	count float64
	at    time.Time // when the last one was noticed; zero where it was raised before anybody looked
}

type alarmAnswer struct {
	Alarm    string     `json:"alarm"`
	Severity string     `json:"severity"`
	Summary  string     `json:"summary"`
	Count    float64    `json:"count"`
	LastAt   *time.Time `json:"last_at"`
	Active   bool       `json:"active"`
	Runbook  string     `json:"runbook"`
}

// noteAlarms compares the counters with those of the last look.
func (h *history) noteAlarms(now time.Time, m metrics) {
	begun := m.gauge("process_start_time_seconds")
	h.mu.Lock()
	defer h.mu.Unlock()
	first := h.alarms == nil
	if first {
		h.alarms = map[string]*raisedAlarm{}
	}
	if at := time.UnixMilli(int64(begun * 1000)); begun > 0 && !at.Equal(h.begun) {
		// Another process counts from 0. One that has just begun has raised what it has raised just now.
		h.begun = at
		clear(h.alarms)
		first = now.Sub(at) > 3*sampleEvery
	}
	m.each("walpost_alarms_total", func(one *dto.Metric) {
		name, count := label(one, "alarm"), one.GetCounter().GetValue()
		known := h.alarms[name]
		switch {
		case count == 0:
		case known == nil && first:
			h.alarms[name] = &raisedAlarm{count: count}
		case known == nil || count != known.count:
			h.alarms[name] = &raisedAlarm{count, now}
		}
	})
}

func (c *Console) alarms(http.ResponseWriter, *http.Request) (any, error) {
	c.look()
	return map[string]any{"alarms": c.history.raised(time.Now())}, nil
}

// raised are the alarms since the relay's start, the newest first.
func (h *history) raised(now time.Time) []alarmAnswer {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := []alarmAnswer{}
	for name, raised := range h.alarms {
		about, known := alarmTexts[name]
		if !known { // a relay of another version
			about.severity = "warning"
		}
		a := alarmAnswer{
			Alarm: name, Severity: about.severity, Summary: about.summary, Count: raised.count,
			Active:  now.Sub(h.begun) < alarmFor || !raised.at.IsZero() && now.Sub(raised.at) < alarmFor,
			Runbook: "docs/ALARMS.html#" + name,
		}
		if !raised.at.IsZero() {
			at := raised.at.UTC()
			a.LastAt = &at
		}
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b alarmAnswer) int {
		return cmp.Or(h.alarms[b.Alarm].at.Compare(h.alarms[a.Alarm].at), cmp.Compare(a.Alarm, b.Alarm))
	})
	return all
}

type alarmText struct{ severity, summary string }

// alarmTexts say of each alarm what the index of docs/ALARMS.md says.
var alarmTexts = map[string]alarmText{
	"comparison_given_up": {"warning", "a start could not ask whether the stream has lost rows"},
	"events_lost":         {"critical", "JetStream lost stored messages; they are delivered again"},
	"false_duplicate":     {"warning", "JetStream reported a duplicate that the stream does not hold"},
	"foreign_message":     {"warning", "another writer publishes into an exclusive stream"},
	"forged_message":      {"warning", "another writer published under a pending row's message id"},
	"inserted_marked":     {"warning", "a producer inserts rows as processed"},
	"missed_rows":         {"warning", "the WAL did not bring rows; the table delivered them"},
	"no_consumer":         {"warning", "the recovery scan gets no consumer, and is slow"},
	"no_progress":         {"warning", "starts fail again and again at one step"},
	"nothing_to_compare":  {"warning", "rows are marked, and no message in the stream belongs to them"},
	"phantoms":            {"warning", "the stream holds events that a failover undid"},
	"publication_skipped": {"warning", "PostgreSQL 18 decoded without the publication"},
	"rival":               {"critical", "another relay of the same source writes to the stream"},
	"row_locked":          {"warning", "a row or a table has been locked for more than five seconds"},
	"row_unsettled":       {"warning", "the database refuses a row's mark or record"},
	"rows_changed":        {"warning", "marked rows differ from their messages"},
	"server_rolled_back":  {"critical", "PostgreSQL was put back to an older state"},
	"slot_foreign":        {"warning", "another program has a slot of the relay's name"},
	"slot_given_up":       {"warning", "the slot is useless and is recreated"},
	"slot_in_use":         {"critical", "another program streams the slot"},
	"slot_left":           {"critical", "the relay polls and cannot drop its slot"},
	"slot_not_made":       {"warning", "the slot cannot be created"},
	"slot_shared":         {"warning", "a relay with other outboxes or another stream holds the lock"},
	"slot_unreadable":     {"critical", "mark: none: the slot cannot be read on"},
	"standby_slot":        {"critical", "PostgreSQL sends no WAL until a standby has it"},
	"stream_gone":         {"critical", "the stream does not exist any more"},
	"stream_replaced":     {"critical", "the stream was deleted and recreated"},
	"stream_rolled_back":  {"critical", "the stream ends before an acknowledged message"},
	"stream_unfit":        {"warning", "the stream was edited into one that a start refuses"},
	"synchronous":         {"critical", "commits wait for the relay"},
	"table_unfit":         {"warning", "a table was changed into one that a start refuses"},
	"undecodable":         {"warning", "the WAL holds a row that the layout does not fit"},
	"unpublished":         {"critical", "the publication does not bring every row"},
	"unsendable":          {"warning", "the walsender fails at a row"},
	"wal_lost":            {"critical", "mark: none: the slot is gone, with the events in it"},
	"walsender_silent":    {"critical", "the walsender hangs"},
}
