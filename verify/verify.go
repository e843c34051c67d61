// Package verify compares outboxes with the stream that they were relayed into, by
// message id: whether everything is there, once, in its order, and nothing else.
//
// It runs beside a relay. Whatever looks wrong at first is looked at again, when
// the other side has had the time to catch up.
package verify

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// batch is how many rows are looked for at once.
	batch = 1000
	// keptPayload is the longest payload that is read of a pending row, in bytes: of a row
	// with a longer one the report names no content hash.
	keptPayload = 1 << 20
	// suspectRows is how many rows that look missing are looked at again together.
	suspectRows = 10_000
	// remembered bounds each list that has to be kept exactly: messages without a
	// row, and message ids that came twice.
	remembered = 200_000
)

// Config says what is compared.
type Config struct {
	Postgres table.Config
	Slot     string
	Outboxes []*outbox.Table
	Stream   *jetstream.Stream
	Source   string // of the message ids
	// Phantom tells positions of WAL that the server never had; nil where that is not
	// known.
	Phantom func(outbox.Position) bool
	// Since, by this machine's clock, limits the comparison to later messages and marks; zero is everything.
	Since time.Time
	// KeptFor is how long after its mark a row is in its table or the archive; 0, and a nil function, are for
	// ever. Messages that are older may have no row.
	KeptFor func(*outbox.Table) time.Duration
	// DelayThreshold and FallbackInterval are the relay's: which rows were meant for
	// later, and how long it pauses between two searches of the tables.
	DelayThreshold, FallbackInterval time.Duration
	// Skip is the relay's on_poison: a row that failed may be overtaken, and is sent late.
	Skip bool
	// Repair makes missing rows pending again: the running relay delivers them.
	Repair bool
	// Own, if set, tells the messages of rows from those that others have published under their ids, by what
	// outbox_sent has. The events have no payload.
	Own func(
		[]*outbox.Table, []table.Sent, *jetstream.StreamInfo,
	) func(*outbox.Table, *jetstream.Message, *outbox.Event) bool
	// Progress, where it is set, is told how far the reading of the stream is.
	Progress func(done, total uint64)
}

// Run compares. It needs up to two bytes for each row whose id comes from a sequence
// (a bit where none is missing), 20 for others, and up to 90 for each aggregate.
//
// Where it breaks off after something was compared, it returns the report beside the
// error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	db, err := table.Open(ctx, cfg.Postgres)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	if err := db.Unbind(ctx); err != nil {
		return nil, err
	}
	v := &comparison{
		cfg: cfg, db: db, report: newReport(), tables: map[string]*comparedTable{},
		order: map[uint64]spot{}, seed: maphash.MakeSeed(),
		numbers: map[history]uint32{}, twice: map[string]struct{}{}, late: map[uint64]Case{},
	}
	for _, t := range cfg.Outboxes {
		if err := db.CheckTable(ctx, t); err != nil {
			return nil, err
		}
		compared := &comparedTable{Table: t, seen: newIDs()}
		if err := v.findDeliveries(ctx, compared); err != nil {
			return nil, err
		}
		v.tables[t.String()] = compared
	}
	err = v.run(ctx)
	if v.report.FirstSeq == 0 {
		return nil, err
	}
	v.report.LastSeq, v.report.Incomplete = v.next-1, err != nil
	v.noteFront()
	v.noteElsewhere()
	return v.report, err
}

type comparison struct {
	cfg    Config
	db     *table.DB
	report *Report
	tables map[string]*comparedTable
	// oldest is the stream's first message when it began, first the first that was
	// read, next the one after the last.
	oldest, first, next uint64
	since               time.Time // of marks, by the database's clock
	// wasEmpty: the stream had no message when it began. Else front is its first one
	// when that was asked last, and trimmed is set where it put since off.
	wasEmpty, trimmed bool
	front             uint64
	order             map[uint64]spot // by aggregate
	seed              maphash.Seed
	histories         []history
	numbers           map[history]uint32  // of the histories
	strangers         []jetstream.Message // without a row, so far
	twice             map[string]struct{} // message ids of rows that were met more than once
	// late are such messages that are reordered, by sequence, unless they are duplicates.
	late  map[uint64]Case
	known []table.Sent                                                // outbox_sent
	own   func(*outbox.Table, *jetstream.Message, *outbox.Event) bool // of [Config.Own]
}

type comparedTable struct {
	*outbox.Table
	seen       *ids // of the rows that the stream has
	deliveries *table.Deliveries
}

func (v *comparison) run(ctx context.Context) error {
	started, err := v.db.Now(ctx)
	if err != nil {
		return err
	}
	info, err := v.cfg.Stream.Info(ctx)
	if err != nil {
		return err
	}
	v.oldest = max(info.FirstSeq, 1)
	v.first, v.next, v.wasEmpty = v.oldest, v.oldest, info.Messages == 0
	if !v.cfg.Since.IsZero() {
		v.since = started.Add(-time.Since(v.cfg.Since))
		from, err := v.cfg.Stream.SeqSince(ctx, v.cfg.Since)
		if err != nil {
			return err
		}
		v.first = max(v.first, from)
		v.next = v.first
	}
	v.trim(info)
	if v.cfg.Own != nil {
		v.own = v.cfg.Own(v.cfg.Outboxes, v.known, info)
	}
	v.report.FirstSeq = v.first
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	for _, t := range v.cfg.Outboxes {
		compared := v.tables[t.String()]
		err := v.rows(ctx, compared, started)
		if err == nil {
			err = v.overlooked(ctx, compared)
		}
		if err != nil {
			return err
		}
	}
	if err := v.judgePending(ctx); err != nil {
		return err
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	if err := v.judgeTwice(ctx); err != nil {
		return err
	}
	return v.judgeStrangers(ctx)
}

func (v *comparison) note(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(v.report.Notes, s) {
		v.report.Notes = append(v.report.Notes, s)
	}
}

func (v *comparison) findDeliveries(ctx context.Context, t *comparedTable) (err error) {
	t.deliveries, err = v.db.ReadDeliveries(ctx, t.Table,
		table.SentOf(t.Table, v.cfg.Source, v.cfg.Stream.Name(), v.cfg.Stream.Domain()))
	if err == nil {
		v.known = t.deliveries.Known
	}
	return err
}

func (v *comparison) noteElsewhere() {
	for _, t := range v.tables {
		for _, e := range t.deliveries.Elsewhere {
			if e.LeftOut == 0 {
				continue
			}
			where := ""
			if e.Condition != "" {
				where = " where " + e.Condition
			}
			v.note("%d rows of %s were not looked for: they were marked while they were delivered to stream "+
				"%s%s: compare that one, too. Rows that no longer fit this stream's condition may be "+
				"among them", e.LeftOut, t, e.Stream, where)
		}
	}
}
