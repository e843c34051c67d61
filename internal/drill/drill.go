// Package drill breaks a staging system on purpose, and counts what became of its events.
package drill

import (
	"context"
	"fmt"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/verify"
)

// Config says which system is broken, and how it is watched.
type Config struct {
	Postgres table.Config
	Outboxes []*outbox.Table
	Stream   *jetstream.Stream
	Source   string // of the message ids
	Fault    Fault
	// Rate is how many events the drill writes a second, into the first outbox; 0 is none.
	Rate int
	// For is how long it writes, half of it before the fault. Patience bounds the wait for the first event,
	// the fault, and the wait for the backlog.
	For, Patience time.Duration
	// DelayThreshold is the relay's: which rows are meant for later.
	DelayThreshold time.Duration
	// Verify compares tables and stream since a time.
	Verify func(ctx context.Context, since time.Time) (*verify.Report, error)
	// Alarms counts the relay's alarms by name; an error says why they are not known.
	Alarms func(ctx context.Context) (map[string]int64, error)
	// Say tells people what happens.
	Say func(format string, args ...any)
}

// Fault is one way to break the system.
type Fault interface {
	Name() string
	// Check refuses a system that the fault does not fit. It changes nothing.
	Check(ctx context.Context, d *Drill) error
	// Inject breaks the system. It returns when the system is broken, or mended from outside.
	Inject(ctx context.Context, d *Drill) error
}

// Drill is one drill. Prepare makes it, Run runs it once.
type Drill struct {
	cfg    Config
	db     *table.DB // what is left of it, see query
	report *Report
	load   *load
	watch  *watch
	first  uint64 // sequence of the stream
	before map[string]int64
	// relay is the session that held the lock at the beginning, slot the relay's slot then; nil is none.
	relay *pg.Session
	slot  *pg.SlotState
}

// Prepare checks that the system may be broken and that a relay runs. It changes nothing. Close the drill.
func Prepare(ctx context.Context, cfg Config) (*Drill, error) {
	d := &Drill{cfg: cfg, report: &Report{
		Drill: cfg.Fault.Name(), Slot: cfg.Postgres.Slot, Steps: []Step{},
	}}
	if err := d.prepare(ctx); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *Drill) prepare(ctx context.Context) (err error) {
	if d.db, err = d.open(ctx); err != nil {
		return err
	}
	if d.report.Database, err = checkAllowed(ctx, d.db); err != nil {
		return err
	}
	for _, t := range d.cfg.Outboxes {
		if err := d.db.CheckTable(ctx, t); err != nil {
			return err
		}
	}
	if err := d.findRelay(ctx); err != nil {
		return err
	}
	info, err := d.cfg.Stream.Info(ctx)
	if err != nil {
		return err
	}
	d.report.Stream, d.first = info.Config.Name, info.LastSeq+1
	if err := d.cfg.Fault.Check(ctx, d); err != nil {
		return err
	}
	if t := d.cfg.Outboxes[0]; d.cfg.Rate > 0 && !table.Ordered(t) {
		d.note("the order of the drill's events is not compared: "+
			"the ids of %s do not tell which row came first", t)
	}
	d.load, err = newLoad(ctx, d)
	return err
}

// Close ends the connections.
func (d *Drill) Close() {
	if d.db != nil {
		d.db.Close()
	}
}

func (d *Drill) open(ctx context.Context) (*table.DB, error) {
	db, err := table.Open(ctx, d.cfg.Postgres)
	if err != nil {
		return nil, err
	}
	if err := db.Unbind(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// query asks the database, on another connection where the last one was lost.
func (d *Drill) query(ctx context.Context, ask func(db *table.DB) error) (err error) {
	if !d.db.Alive() {
		db, err := d.open(ctx)
		if err != nil {
			return err
		}
		d.db.Close()
		d.db = db
	}
	return ask(d.db)
}

func (d *Drill) findRelay(ctx context.Context) (err error) {
	if d.relay, err = d.db.LockHolder(ctx); err != nil {
		return err
	}
	if d.relay == nil {
		return hint.Errorf("start it first (walpost run): a drill shows how a running relay recovers",
			"no relay of slot %q runs", d.cfg.Postgres.Slot)
	}
	d.slot, err = d.db.ReadSlot(ctx, d.cfg.Postgres.Slot)
	return err
}

// streams reports whether the relay reads the WAL. Else it polls.
func (d *Drill) streams() bool {
	return d.slot != nil && d.slot.ActivePID != nil && d.slot.Confirmed != ""
}

// withoutRecord names an outbox whose marked rows do not tell that they were delivered; "" is none.
func (d *Drill) withoutRecord() string {
	for _, t := range d.cfg.Outboxes {
		if !table.MarkOf(t).Stays() {
			return fmt.Sprintf("%s has mark %s", t, t.Mark)
		}
	}
	return ""
}

// Outbox is the one that the drill writes into, "" where it writes nothing.
func (d *Drill) Outbox() string {
	if d.cfg.Rate == 0 {
		return ""
	}
	return d.cfg.Outboxes[0].String()
}

// Database is the name of the database that is meant.
func (d *Drill) Database() string { return d.report.Database }

// Slot is the name of the relay's slot.
func (d *Drill) Slot() string { return d.report.Slot }

// Stream is the name of the stream.
func (d *Drill) Stream() string { return d.report.Stream }

// step records what was done to the system.
func (d *Drill) step(format string, args ...any) {
	s := Step{time.Now().UTC(), fmt.Sprintf(format, args...)}
	d.report.Steps = append(d.report.Steps, s)
	d.cfg.Say("%s", s.Text)
}

func (d *Drill) note(format string, args ...any) {
	d.report.Notes = append(d.report.Notes, fmt.Sprintf(format, args...))
}
