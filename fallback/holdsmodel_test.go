package fallback

import (
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestHoldsModel has a producer, the WAL handler, the poller and the marker take turns over holds in a
// random order, with crashes between any two steps. The model is a table, a WAL and a stream in memory.
// It holds them to the law: a parked row holds its aggregate's later rows; a hold is recorded in the
// row before the WAL is settled; it ends only when no record is pending or under way; a start rebuilds
// it from the records; past the cap the table is asked. In the end every row is stored once, and no
// hold is left.
func TestHoldsModel(t *testing.T) {
	queued := mostQueued // a variable of the package: nothing else runs beside
	t.Cleanup(func() { mostQueued = queued })
	mostQueued = 4
	counts := map[string]int{}
	for seed := range uint64(testenv.Size(t, 200, 800)) {
		m := &model{rng: rand.New(rand.NewPCG(seed, 0)), table: heldTable(), counts: counts}
		m.most = 2 + int(seed%2)*1000 // in every second run more are held than are remembered
		m.run(1000)
		m.finish()
		if m.broken != nil {
			t.Fatalf("seed %d: %v", seed, m.broken)
		}
	}
	for _, what := range []string{
		"queued", "recorded behind a full queue", "sent from a queue", "recorded from a queue", "waited",
		"retried under a drain", "refused from a queue", "asked", "crashed", "crashed in a drain",
	} {
		if counts[what] == 0 {
			t.Errorf("no run had this, and the test shows less than it says: %s", what)
		}
	}
	t.Log(counts)
}

// modelRow is a row of the table. Its id is its place in the WAL.
type modelRow struct {
	id       int
	of       Aggregate
	ev       *outbox.Event
	cursed   bool // it cannot be sent now
	retried  bool // it was inserted with a record
	recorded bool
	attempts int
	sent     bool // its message is in the stream
	gone     bool // marked, or a dead letter
	settled  bool // the WAL is not needed for it
	met      bool // the relay knows of its record
}

type modelJob struct {
	row  *modelRow
	park bool
}

type model struct {
	rng    *rand.Rand
	table  *outbox.Table
	h      *Holds
	most   int
	counts map[string]int

	rows     []*modelRow
	first    int       // all before it are gone
	until    int       // the recovery LSN: up to there the table decides
	received int       // rows that the WAL handler is done with
	gate     *modelRow // the one that it is at work on
	jobs     []modelJob
	draining bool
	actors   []*modelActor
	broken   error
}

// modelActor is a goroutine of the relay, as a coroutine.
type modelActor struct {
	step func() (struct{}, bool)
	stop func()
}

var errModelCrash = errors.New("crash")

func (m *model) act(f func(pause func())) {
	step, stop := iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if x := recover(); x != nil && x != errModelCrash { //nolint:errorlint // it is this value
				panic(x)
			}
		}()
		f(func() {
			if !yield(struct{}{}) {
				panic(errModelCrash)
			}
		})
	})
	m.actors = append(m.actors, &modelActor{step, stop})
}

func (m *model) fail(format string, args ...any) {
	if m.broken == nil {
		m.broken = fmt.Errorf(format, args...)
	}
}

// start is a session's: holds are loaded from the records.
func (m *model) start() {
	m.h = NewHolds(m.most)
	records := func(_ *outbox.Table, each func(outbox.AggregateKey)) error { return m.records(each) }
	if err := m.h.Load(records, []*outbox.Table{m.table}); err != nil {
		m.fail("load: %w", err)
	}
	m.until, m.received, m.gate, m.jobs, m.draining = len(m.rows), 0, nil, nil, false
	for m.received < len(m.rows) && m.rows[m.received].settled {
		m.received++
	}
	for _, r := range m.rows {
		r.gone = r.gone || r.sent // the recovery scan has found it
		r.met = r.recorded
	}
	m.act(m.handle)
	m.act(m.loop)
	m.act(m.settle)
}

func (m *model) crash() {
	for _, a := range m.actors {
		a.stop()
	}
	m.actors = nil
}

func (m *model) run(steps int) {
	m.start()
	for range steps {
		if m.broken != nil {
			return
		}
		switch n := m.rng.IntN(100); {
		case n < 6:
			m.insert()
		case n < 9:
			for _, r := range m.rows {
				r.cursed = r.cursed && m.rng.IntN(2) == 0
			}
		case n == 9 && m.rng.IntN(4) == 0:
			m.counts["crashed"]++
			if m.draining {
				m.counts["crashed in a drain"]++
			}
			m.crash()
			m.start()
		default:
			m.turn()
		}
	}
}

func (m *model) turn() {
	m.actors[m.rng.IntN(len(m.actors))].step()
	m.law()
}

// finish lets everything come out.
func (m *model) finish() {
	for _, r := range m.rows {
		r.cursed = false
	}
	done := func() bool {
		return !slices.ContainsFunc(m.rows,
			func(r *modelRow) bool { return !r.gone || !r.settled }) && !m.h.Any()
	}
	for n := 0; m.broken == nil && !done(); n++ {
		if m.turn(); n > 20_000 {
			m.fail("it does not come to rest: %d holds, %d rows queued", len(m.h.byKey), m.h.rows)
		}
	}
	if m.broken == nil && (m.h.rows != 0 || m.h.bytes != 0) {
		m.fail("no row is queued, and %d rows of %d bytes are counted", m.h.rows, m.h.bytes)
	}
	m.crash()
}

// insert commits a row: one in eight cannot be sent, and dead letters are tried again.
func (m *model) insert() {
	r := &modelRow{id: len(m.rows), cursed: m.rng.IntN(8) == 0}
	of := 1 + m.rng.IntN(4)
	r.ev = heldEvent(m.table, r.id, of)
	r.of = AggregateOf(r.ev)
	if m.rng.IntN(12) == 0 {
		r.retried, r.recorded = true, true
	}
	m.rows = append(m.rows, r)
}

// law is what has to be true at every moment.
func (m *model) law() {
	for ; m.first < len(m.rows) && m.rows[m.first].gone; m.first++ {
		continue
	}
	for _, r := range m.rows[m.first:] {
		if r.recorded && r.met && !r.gone && m.h.check(r.of, 0) == IsFree {
			m.fail("row %d is recorded, and its aggregate is not held", r.id)
		}
	}
	for _, j := range m.jobs {
		if m.h.check(j.row.of, 0) == IsFree {
			m.fail("row %d is about to be recorded, and its aggregate is not held", j.row.id)
		}
	}
	for _, x := range m.h.byKey {
		if x.underWay < 0 {
			m.fail("%d records are under way", x.underWay)
		}
	}
}

// send stores a row's message.
func (m *model) send(r *modelRow) {
	for _, before := range m.rows[:r.id] {
		if before.of == r.of && !before.sent && !before.gone && !r.retried {
			m.fail("row %d passes row %d of its aggregate", r.id, before.id)
		}
	}
	if r.sent || r.gone {
		m.fail("row %d is sent twice", r.id)
	}
	r.sent = true
}

// settled notes that the WAL is not needed for a row.
func (m *model) settled(r *modelRow) {
	if !r.gone && !r.recorded {
		m.fail("row %d is settled, and neither stored nor recorded", r.id)
	}
	r.settled = true
}

// records is DB.Aggregates: each aggregate with a record once.
func (m *model) records(each func(outbox.AggregateKey)) error {
	keys := map[outbox.AggregateKey]bool{}
	for _, r := range m.rows {
		if r.recorded && !r.gone && !keys[r.of.Key] {
			keys[r.of.Key] = true
			each(r.of.Key)
		}
	}
	return nil
}

func (m *model) ask(evs []*outbox.Event, pause func()) AsOf {
	asked, _ := m.h.Ask(evs, func(evs []*outbox.Event) (have []bool, err error) {
		m.counts["asked"]++
		pause()
		for _, ev := range evs {
			have = append(have, slices.ContainsFunc(m.rows, func(r *modelRow) bool {
				return r.of == AggregateOf(ev) && r.recorded && !r.gone
			}))
		}
		pause()
		return have, nil
	})
	return asked
}

// record hands a row to the marker.
func (m *model) record(r *modelRow, park bool) { m.jobs = append(m.jobs, modelJob{r, park}) }

// handle is the WAL handler: see walHandler.Row.
func (m *model) handle(pause func()) {
	for {
		for m.received == len(m.rows) {
			pause()
		}
		r := m.rows[m.received]
		m.gate = r
		m.handleRow(r, pause)
		m.gate = nil
		m.received++
		pause()
	}
}

func (m *model) handleRow(r *modelRow, pause func()) {
	if r.retried {
		if m.draining {
			m.counts["retried under a drain"]++
		}
		m.h.BeginRecord(r.of)
		r.met = true
		pause()
		m.record(r, false)
		return
	}
	var asked AsOf
	if r.id < m.until || m.h.Any() && m.h.Unsure(r.of) {
		publish := !r.gone && !r.recorded
		pause()
		asked = m.ask([]*outbox.Event{r.ev}, pause)
		pause()
		if !publish {
			r.settled = true
			return
		}
	}
	for {
		v, record := m.h.Join(PendingRow{r.ev, transaction{}}, asked)
		switch v {
		case IsUnknown:
			asked = m.ask([]*outbox.Event{r.ev}, pause)
		case IsEmptying:
			m.counts["waited"]++
			for m.h.emptiedEnd() != nil {
				pause()
			}
		case IsHeld:
			if len(record) == 0 {
				m.counts["queued"]++
			}
			if len(record) > 1 {
				m.counts["recorded behind a full queue"]++
			}
			for _, q := range record {
				pause()
				m.record(m.rowOf(q), false)
			}
			return
		case IsFree:
			pause()
			m.sendOrPark(r, pause)
			return
		}
		pause()
	}
}

func (m *model) rowOf(q PendingRow) *modelRow {
	var id int
	_, _ = fmt.Sscan(string(q.Event.Values[outbox.ID]), &id)
	return m.rows[id]
}

func (m *model) sendOrPark(r *modelRow, pause func()) (sent bool) {
	if !r.cursed {
		m.send(r)
		return true
	}
	m.h.BeginRecord(r.of)
	pause()
	m.record(r, true)
	return false
}

// settle is the marker: it records the first row of an aggregate's line, or marks what is stored.
func (m *model) settle(pause func()) {
	for {
		pause()
		stored := slices.IndexFunc(m.rows, func(r *modelRow) bool { return r.sent && !r.gone })
		if stored >= 0 && (len(m.jobs) == 0 || m.rng.IntN(2) == 0) {
			m.rows[stored].gone = true
			pause()
			m.settled(m.rows[stored])
			continue
		}
		if len(m.jobs) == 0 {
			continue
		}
		j := m.jobs[m.rng.IntN(len(m.jobs))]
		j = m.jobs[slices.IndexFunc(m.jobs, func(first modelJob) bool { return first.row.of == j.row.of })]
		j.row.recorded, j.row.met = true, true
		if j.park {
			if j.row.attempts++; j.row.attempts == 4 {
				j.row.gone = true
			}
		}
		pause()
		i := slices.Index(m.jobs, j)
		m.jobs = slices.Delete(m.jobs, i, i+1)
		pause()
		m.h.EndRecord(j.row.of)
		m.settled(j.row)
	}
}

// loop makes passes: see poller.turn.
func (m *model) loop(pause func()) {
	for {
		pause()
		var recorded, fresh []modelRow // as they were listed
		waits := map[Aggregate]bool{}
		for _, r := range m.rows {
			switch {
			case r.gone:
			case !r.recorded:
				fresh = append(fresh, *r)
			case waits[r.of]:
			case r.attempts > 0 && m.rng.IntN(2) == 0:
				waits[r.of] = true // it is not due
			default:
				recorded = append(recorded, *r)
			}
		}
		if len(recorded)+len(fresh) > 0 {
			proven := len(m.rows)
			for m.received < proven {
				pause()
			}
		}
		for _, r := range recorded {
			m.h.open(r.of)
			m.rows[r.id].met = true
		}
		pause()
		sent := m.deliver(recorded, fresh, pause)
		for range m.rng.IntN(20) {
			pause()
		}
		m.endHolds(sent, pause)
	}
}

func (m *model) deliver(recorded, fresh []modelRow, pause func()) (sent map[Aggregate]bool) {
	taken, blocked, sent := map[int]bool{}, map[Aggregate]bool{}, map[Aggregate]bool{}
	if m.gate != nil {
		taken[m.gate.id] = true
	}
	pause()
	m.h.queued(func(ref outbox.Ref) {
		var id int
		_, _ = fmt.Sscan(ref.ID, &id)
		taken[id] = true
	})
	pause()
	for _, j := range m.jobs {
		taken[j.row.id] = true
	}
	pause()
	for _, r := range m.rows {
		taken[r.id] = taken[r.id] || r.sent
	}
	for _, c := range recorded {
		if taken[c.id] && !m.rows[c.id].sent {
			blocked[c.of] = true
		}
	}
	for _, c := range slices.Concat(recorded, fresh) {
		pause()
		r := m.rows[c.id]
		if taken[c.id] || blocked[c.of] {
			continue
		}
		if r.gone || r.recorded != c.recorded || r.attempts != c.attempts {
			blocked[c.of] = true
			continue
		}
		if !c.recorded {
			var asked AsOf
			v := m.h.check(c.of, asked)
			for ; v == IsUnknown; v = m.h.check(c.of, asked) {
				asked = m.ask([]*outbox.Event{r.ev}, pause)
			}
			if v == IsHeld {
				m.h.BeginRecord(c.of)
				pause()
				m.record(r, false)
				continue
			}
		} else {
			m.h.queueRows(c.of)
		}
		if !m.sendOrPark(r, pause) {
			blocked[c.of] = true
		} else if c.recorded {
			sent[c.of] = true
		}
	}
	return sent
}

func (m *model) endHolds(sent map[Aggregate]bool, pause func()) {
	quiet, when := m.h.quiet(m.table), m.h.now()
	if len(quiet) == 0 && !m.h.forgets(m.table) {
		return
	}
	var keys []outbox.AggregateKey
	records := func(each func(outbox.AggregateKey)) error {
		pause()
		_ = m.records(func(key outbox.AggregateKey) { keys = append(keys, key) })
		for _, key := range keys {
			pause()
			each(key)
		}
		pause()
		return nil
	}
	err := m.h.endThose(m.table, quiet, when, sent, records, func(q PendingRow, send bool) error {
		m.draining = true
		defer func() { m.draining = false }()
		pause()
		r := m.rowOf(q)
		switch {
		case !send:
			m.counts["recorded from a queue"]++
			m.record(r, false)
		case m.sendOrPark(r, pause):
			m.counts["sent from a queue"]++
		default:
			m.counts["refused from a queue"]++
		}
		pause()
		return nil
	})
	if err != nil {
		m.fail("end holds: %w", err)
	}
	for _, key := range keys {
		if of := (Aggregate{m.table, key}); !sent[of] && m.h.queues(of) {
			m.fail("rows queue up behind a record that stays: the WAL waits for them")
		}
	}
}
