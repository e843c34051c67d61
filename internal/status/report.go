// Package status is the report of what runs now, for `walpost status` and the console. It only reads, and
// asks no relay.
package status

import (
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// CountMost is where counting stops: a number that large is not read to its last digit.
const CountMost = 100_000

// Look is how long one question to PostgreSQL may take.
const Look = 2 * time.Second

// Report is what `walpost status --json` prints; cmd/walpost/help/status.txt has its names. nil is not known.
type Report struct {
	At          time.Time  `json:"at"`
	Server      *pg.Server `json:"server"`
	Relay       *Relay     `json:"relay"`
	Slot        *Slot      `json:"slot"`
	NewSlot     *Slot      `json:"new_slot"`
	CountLimit  int        `json:"count_limit"`
	Outboxes    []*Outbox  `json:"outboxes"`
	DeadLetters *int       `json:"dead_letters"`
	// DeadLettersOf are the dead letters of each outbox, also of those that are not configured.
	DeadLettersOf map[string]int `json:"dead_letters_by_outbox"`
	Replay        *table.Replay  `json:"replay"`
	Stream        *Stream        `json:"stream"`
	Unread        []Unread       `json:"unread"`
	Errors        []Unasked      `json:"errors"`
}

// Relay is who holds the lock, and what for.
type Relay struct {
	Mode       string      `json:"mode"`
	Lock       *pg.Session `json:"lock"`
	StandingBy *int        `json:"standing_by"`
	// SlotShared: the lock's holder has other outboxes, or another stream, than this configuration.
	SlotShared bool `json:"slot_shared"`
}

// Slot is a replication slot.
type Slot struct {
	Name   string `json:"name"`
	Exists bool   `json:"exists"`
	*pg.SlotState
	Walsender *pg.Session `json:"walsender"`
}

// Streamed reports whether something reads the slot. One that is being created is in use, too, and has
// confirmed nothing yet.
func (s *Slot) Streamed() bool { return s.Exists && s.ActivePID != nil && s.Confirmed != "" }

// Outbox is what one table says.
type Outbox struct {
	Table string `json:"table"`
	// Name is the outbox's, where it is not the table's.
	Name         string      `json:"outbox,omitempty"`
	Mark         outbox.Mark `json:"mark"`
	Pending      *int        `json:"pending"`
	OldestDueAge *float64    `json:"oldest_due_age_seconds"`
	Parked       *int        `json:"parked"`
	Held         *int        `json:"held"`
	// Progress is that of the journal, nil with other marks.
	Progress *table.Progress `json:"progress,omitempty"`
	// Dates and Records are the layout's.
	Dates   bool `json:"-"`
	Records bool `json:"-"`
}

// Stream is the stream of the configuration.
type Stream struct {
	Name   string `json:"name"`
	Exists bool   `json:"exists"`
	*StreamFacts
}

// StreamFacts are those of a stream that exists.
type StreamFacts struct {
	Messages        uint64     `json:"messages"`
	Bytes           uint64     `json:"bytes"`
	FirstSeq        uint64     `json:"first_sequence"`
	LastSeq         uint64     `json:"last_sequence"`
	LastMessage     *time.Time `json:"last_message_at"`
	Created         time.Time  `json:"created_at"`
	Replicas        int        `json:"replicas"`
	Leader          *string    `json:"leader"`
	DuplicateWindow float64    `json:"duplicate_window_seconds"`
	Batches         []string   `json:"batches"`
}

// Unread is a part of the report that could not be read.
type Unread struct {
	Part  string `json:"part"`
	Error string `json:"error"`
	Hint  string `json:"hint"`
}

// Unasked is a server that could not be asked.
type Unasked struct {
	Server string `json:"server"`
	Error  string `json:"error"`
	Hint   string `json:"hint"`
}

// New is a report of nothing yet.
func New() *Report {
	return &Report{
		At: time.Now().UTC(), CountLimit: CountMost,
		Outboxes: []*Outbox{}, Unread: []Unread{}, Errors: []Unasked{},
	}
}

// Fail notes that a server, "postgres" or "nats", could not be asked.
func (r *Report) Fail(server string, err error) {
	r.Errors = append(r.Errors, Unasked{server, hint.OneLine(err.Error()), hint.Of(err)})
}

// look leaves a part out that cannot be read.
func (r *Report) look(part string, err error) bool {
	if err != nil {
		r.Unread = append(r.Unread, Unread{part, hint.OneLine(err.Error()), hint.Of(err)})
	}
	return err == nil
}
