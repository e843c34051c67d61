package drill

import (
	"context"
	"strconv"
	"time"

	"github.com/walpost/walpost/verify"
)

// Seconds is a duration as JSON has it.
type Seconds float64

func seconds(d time.Duration) Seconds { return Seconds(max(d, 0).Seconds()) }

// MarshalJSON writes milliseconds, and no more digits.
func (s Seconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(s), 'f', 3, 64), nil
}

// String is for people.
func (s Seconds) String() string {
	return (time.Duration(float64(s)*1000) * time.Millisecond).String()
}

// Step is something that was done to the system.
type Step struct {
	At   time.Time `json:"at"`
	Text string    `json:"text"`
}

// Events are the drill's own, as the stream had them in the end.
type Events struct {
	// Committed are those whose commit was answered or that have a message, without those that a failover has
	// lost.
	Committed int `json:"committed"`
	Stored    int `json:"stored"`
	// Pending were not stored when the drill ended, and their rows say so.
	Pending int `json:"pending"`
	// InDoubt have no message, and their commit was not answered: a connection was lost.
	InDoubt    int `json:"in_doubt"`
	Lost       int `json:"lost"`
	Duplicated int `json:"duplicated"`
	Reordered  int `json:"reordered"`
	// Examples name events by the number in their payloads.
	Examples []string `json:"examples,omitempty"`
}

// FailoverLoss is what the promoted server lacks of the drill's events: PostgreSQL lost them, and not the
// relay.
type FailoverLoss struct {
	// Lost were acknowledged by the primary.
	Lost int `json:"lost"`
	// Phantoms are messages of such events, and of those whose commit was not answered.
	Phantoms int `json:"phantoms"`
}

// Report is what a drill has shown.
type Report struct {
	Drill    string        `json:"drill"`
	Database string        `json:"database"`
	Slot     string        `json:"slot"`
	Stream   string        `json:"stream"`
	Outbox   string        `json:"outbox,omitempty"` // that the drill wrote into
	Began    time.Time     `json:"began"`
	Took     Seconds       `json:"took_seconds"`
	Injected *time.Time    `json:"injected"` // nil: nothing was broken
	Steps    []Step        `json:"steps"`
	Events   Events        `json:"events"`
	Failover *FailoverLoss `json:"failover,omitempty"`
	// Lost, Duplicated, Reordered and Phantoms are of all traffic: the greater one of what the drill has
	// counted and what verify has found.
	Lost       int64 `json:"lost"`
	Duplicated int64 `json:"duplicated"`
	Reordered  int64 `json:"reordered"`
	Unknown    int64 `json:"unknown"`
	Phantoms   int64 `json:"phantoms"`
	// Recovered: what was pending at the end of the load was stored within the patience.
	Recovered bool `json:"recovered"`
	// Again and CaughtUp are from the beginning of the fault: until an event was stored that was committed
	// after it, and until everything was stored that was committed by then. Longest is from an event's commit
	// to its message.
	Again    *Seconds       `json:"delivers_again_seconds"`
	CaughtUp *Seconds       `json:"caught_up_seconds"`
	Longest  Seconds        `json:"longest_commit_to_stored_seconds"`
	Verify   *verify.Report `json:"verify"`
	// Alarms are the relay's, by name; nil where they are not known.
	Alarms map[string]int64 `json:"alarms"`
	Notes  []string         `json:"notes,omitempty"`
	// EndedEarly: it was interrupted, or could not go on. Incomplete: something was not counted or compared.
	EndedEarly bool `json:"ended_early,omitempty"`
	Incomplete bool `json:"incomplete,omitempty"`
	// OK: everything was stored once and in order.
	OK bool `json:"ok"`
}

// judge adds up.
func (r *Report) judge() {
	found := func(k verify.Kind) int64 {
		if r.Verify == nil || r.Verify.Found[k] == nil {
			return 0
		}
		return r.Verify.Found[k].Count
	}
	r.Lost = max(int64(r.Events.Lost), found(verify.Missing))
	r.Duplicated = max(int64(r.Events.Duplicated), found(verify.Duplicated))
	r.Reordered = max(int64(r.Events.Reordered), found(verify.Reordered))
	r.Unknown, r.Phantoms = found(verify.Unknown), found(verify.Phantom)
	if r.Failover != nil { // a polled message does not say where the WAL has its row: it is only without one
		r.Phantoms, r.Unknown = max(int64(r.Failover.Phantoms), r.Phantoms+r.Unknown), 0
	}
	r.OK = r.Recovered && r.Lost+r.Duplicated+r.Reordered+r.Unknown+int64(r.Events.Pending) == 0
}

// countAlarms subtracts those from before, unless the counters have begun again.
func (d *Drill) countAlarms(ctx context.Context) {
	after, err := d.cfg.Alarms(ctx)
	if err != nil {
		d.note("the relay's alarms are not known: %v", err)
		return
	}
	d.report.Alarms = map[string]int64{}
	for name, n := range after {
		if n >= d.before[name] {
			n -= d.before[name]
		}
		if n > 0 {
			d.report.Alarms[name] = n
		}
	}
}
