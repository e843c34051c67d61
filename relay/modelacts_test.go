package relay_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// modelAct is something that people do. do reports whether it could be done.
type modelAct struct {
	name string
	do   func(*model) bool
}

var modelActs = []modelAct{
	{"committed", func(m *model) bool { m.commit(false, "now()", "order.placed"); return true }},
	{"delayed", func(m *model) bool {
		m.commit(true, fmt.Sprintf("now() + interval '%d ms'", 100+m.rng.IntN(3000)), "order.placed")
		return true
	}},
	{"failed", func(m *model) bool { m.commit(true, "now()", "payment.taken"); return true }},
	{"open", func(m *model) bool { m.begin(false); return true }},
	{"prepared", func(m *model) bool { m.begin(true); return true }},
	{"held open", func(m *model) bool { // beyond two steps of the progress
		m.endAll()
		m.begin(m.rng.IntN(2) == 0)
		m.commit(false, "now()", "order.placed")
		for _, x := range m.relays {
			m.settle(x)
		}
		time.Sleep(3 * time.Second)
		return m.end(true)
	}},
	{"transaction committed", func(m *model) bool { return m.end(true) }},
	{"transaction rolled back", func(m *model) bool { return m.end(false) }},
	{"far ids", func(m *model) bool {
		m.exec(`SELECT setval(pg_get_serial_sequence('outbox_messages', 'id'), nextval(pg_get_serial_sequence('outbox_messages', 'id')) + $1)`, 1+m.rng.IntN(2*modelPartition))
		return true
	}},
	{"killed", func(m *model) bool {
		x := m.any()
		x.process.kill()
		m.commit(false, "now()", "order.placed")
		m.start(x)
		return true
	}},
	{"stopped", func(m *model) bool {
		x := m.any()
		x.process.terminate()
		m.commit(false, "now()", "order.placed")
		m.start(x)
		return true
	}},
	{"run once", func(m *model) bool {
		m.endAll() // it would wait for them, to make its slot
		x := m.any()
		x.process.terminate()
		m.commit(false, "now()", "order.placed")
		m.walpost(x, "run", "--once")
		m.start(x)
		return true
	}},
	{"due soon", (*model).dueSoon},
	{"messages lost", (*model).lose},
	{"detached", (*model).detach},
	{"attached", (*model).attach},
	{"detached over retention", func(m *model) bool {
		m.attach()
		m.commit(true, "now()", "payment.taken")
		m.commit(true, "now() + interval '4 seconds'", "order.placed")
		last := m.events[len(m.events)-1]
		m.exec(`SELECT setval(pg_get_serial_sequence('outbox_messages', 'id'), $1)`, last.id+modelPartition)
		m.commit(false, "now()", "order.placed")
		return m.detach() && m.retain() && m.attach()
	}},
	{"detached with its insert", (*model).detachInserted},
	{"inserted again", (*model).insertAgain},
	{"retention", (*model).retain},
	{"truncated", func(m *model) bool {
		c := m.conn()
		for _, name := range []string{"outbox_messages", "outbox_journal", "outbox_deferred", "outbox_known", "outbox_sent", "outbox_messages_dlq"} {
			if run(m.t.Context(), c, `SET lock_timeout = '1s'; TRUNCATE `+name) == nil {
				m.t.Errorf("%s was truncated", name)
			}
		}
		m.must(c.Close(m.t.Context()))
		return true
	}},
	{"widened", func(m *model) bool {
		x := m.relays[0]
		if len(x.kinds) > 1 { // or the relays are shards
			return false
		}
		x.process.terminate()
		m.exec(`DELETE FROM outbox_known WHERE condition = $1`, x.where()) // it would keep every partition
		x.kinds = []string{"a", "c"}
		x.serial++
		for _, e := range m.events[1:] {
			e.late = e.late || e.kind == "c" // the WAL of some is read before
		}
		m.start(x)
		return true
	}},
	{"searched", func(m *model) bool { m.walpost(m.any(), "outbox", "search", "public.outbox_messages"); return true }},
	{"replayed", func(m *model) bool { return m.replay() }},
	{"replay under way", func(m *model) bool { return m.replay("--no-wait") }},
	{"table made again", func(m *model) bool {
		m.quiet()
		m.makeTable()
		m.forget(1)
		m.exec(`DELETE FROM outbox_messages_dlq`) // nobody can retry them any more
		for _, x := range m.relays {
			m.walpost(x, "migrate", "up")
			m.start(x)
		}
		return true
	}},
	{"dump restored", func(m *model) bool {
		m.endAll()
		m.attach()
		dump, next := filepath.Join(m.dir, "dump.sql"), len(m.events)
		pgCommand(m.t, "pg_dump", "--file", dump, "--dbname", m.url)
		m.commit(false, "now()", "order.placed")
		m.quiet()
		last := m.count(`SELECT nextval(pg_get_serial_sequence('outbox_messages', 'id'))`)
		m.exec(`DO $$ DECLARE name text; BEGIN
			FOR name IN SELECT pubname FROM pg_publication LOOP EXECUTE format('DROP PUBLICATION %I', name); END LOOP; END $$;
			DROP SCHEMA public CASCADE; CREATE SCHEMA public`)
		pgCommand(m.t, "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--file", dump, "--dbname", m.url)
		m.exec(`SELECT setval(pg_get_serial_sequence('outbox_messages', 'id'), $1)`, last) // as OPERATIONS says
		m.forget(next)
		for _, x := range m.relays {
			m.walpost(x, "outbox", "keep", "public.outbox_messages")
			m.start(x)
		}
		return true
	}},
	{"dead letters retried", func(m *model) bool { m.walpost(m.any(), "dlq", "retry", "--all"); return true }},
}

// dueSoon runs a relay until nothing is pending, beside producers whose rows are due within the threshold: they come by the WAL, and are
// deferred meanwhile.
func (m *model) dueSoon() bool {
	m.t.Helper()
	m.endAll()
	x := m.any()
	x.process.terminate()
	var producers sync.WaitGroup
	for range 3 {
		c := m.conn()
		var es [][]*modelEvent
		var sqls []string
		for range 8 {
			e, sql := m.rows(true, "clock_timestamp() + interval '900 ms'", "order.placed")
			es, sqls = append(es, e), append(sqls, sql)
		}
		producers.Go(func() {
			for i := range es {
				m.insert(c, es[i], sqls[i])
				for _, e := range es[i] {
					e.committed = true
				}
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
	for range 3 {
		m.walpost(x, "run", "--once")
	}
	producers.Wait()
	m.start(x)
	return true
}

// insertAgain deletes rows that have an entry, and inserts them again.
func (m *model) insertAgain() bool {
	m.t.Helper()
	between := ""
	if m.rng.IntN(2) == 0 {
		between = "COMMIT; BEGIN;"
	}
	m.exec(fmt.Sprintf(`BEGIN; CREATE TABLE taken AS SELECT * FROM outbox_messages WHERE id IN (SELECT e.id FROM outbox_messages e
			WHERE EXISTS (SELECT FROM outbox_journal j WHERE j.ids @> e.id AND j.kind = 'stored') ORDER BY random() LIMIT %d);
		DELETE FROM outbox_messages WHERE id IN (SELECT id FROM taken); %s
		INSERT INTO outbox_messages OVERRIDING SYSTEM VALUE SELECT * FROM taken; COMMIT`, 1+m.rng.IntN(30), between))
	some := m.count(`SELECT count(*) FROM taken`) > 0
	m.exec(`DROP TABLE taken`)
	return some
}

// replay has a relay's delivered rows published again. It reports false where there are none.
func (m *model) replay(args ...string) bool {
	m.t.Helper()
	out, err := m.run(m.any(), append([]string{"replay", "--all", "--yes"}, args...)...).CombinedOutput()
	if err != nil && !strings.Contains(string(out), "no delivered row") {
		m.t.Fatalf("walpost replay: %v: %s", err, out)
	}
	return err == nil
}

// lose deletes the last messages of a stream while its relay is stopped. They are stored again. One of the table's stays: where none
// does, the relay's alarm says that nothing can be compared.
func (m *model) lose() bool {
	m.t.Helper()
	x := m.any()
	m.settle(x)
	x.process.terminate()
	s, err := m.js().Stream(m.t.Context(), x.stream)
	m.must(err)
	state := s.CachedInfo().State
	var last uint64 // of the message after this one, and its event
	var of *modelEvent
	for seq := state.LastSeq; seq > state.FirstSeq && seq+uint64(1+m.rng.IntN(15)) > state.LastSeq; seq-- {
		msg, err := s.GetMsg(m.t.Context(), seq)
		if errors.Is(err, natsjs.ErrMsgNotFound) {
			continue
		}
		m.must(err)
		n, err := strconv.Atoi(msg.Header.Get("ce-traceid"))
		m.must(err)
		if m.count(`SELECT count(*) FROM outbox_messages WHERE id = $1`, m.events[n].id) == 0 {
			break // retention has dropped its row, or it is away
		}
		if isReplay(msg.Header) {
			m.must(s.DeleteMsg(m.t.Context(), seq))
			continue
		}
		if of != nil {
			m.must(s.DeleteMsg(m.t.Context(), last))
			of.lost = true
		}
		last, of = seq, m.events[n]
	}
	m.start(x)
	m.settle(x) // before retention may drop the rows
	return true
}

// quiet stops the relays when they have stored what they can.
func (m *model) quiet() {
	m.t.Helper()
	m.endAll()
	m.attach()
	for _, x := range m.relays {
		m.settle(x)
		x.process.terminate()
	}
}

// forget: the rows of events from number next on are not there any more. What was not stored then never is.
func (m *model) forget(next int) {
	m.t.Helper()
	times := m.stored()
	for i, e := range m.events {
		if i >= next {
			e.id, e.fails, e.committed = 0, false, times[i] > 0
		}
	}
}

// detach takes a partition away. It reports false where there is none with rows.
func (m *model) detach() bool {
	m.t.Helper()
	if m.away != nil || len(m.parts) == 0 {
		return false
	}
	m.endAll()
	// Of the partitions with rows, but for the last, which takes new ones, one that has deferrals comes first.
	id := m.query1(`SELECT coalesce((SELECT t.id FROM outbox_messages t LEFT JOIN outbox_deferred d ON d.id = t.id
		WHERE t.tableoid <> (SELECT tableoid FROM outbox_messages ORDER BY id DESC LIMIT 1) ORDER BY d.id IS NULL, random() LIMIT 1)::text, '')`)
	i := slices.IndexFunc(m.parts, func(p *modelPart) bool {
		n, err := strconv.ParseInt(id, 10, 64)
		return err == nil && n >= p.from && n < p.to
	})
	if i < 0 {
		return false
	}
	p := m.parts[i]
	m.away = p
	m.exec(`ALTER TABLE outbox_messages DETACH PARTITION ` + m.away.name)
	for _, e := range m.events[1:] {
		e.late = e.late || e.id >= m.away.from && e.id < m.away.to
	}
	return true
}

// detachInserted takes a partition away in the transaction that inserts delayed rows into it, so that no relay sees them before it is
// attached again. Later rows are delivered meanwhile.
func (m *model) detachInserted() bool {
	m.t.Helper()
	m.endAll()
	m.attach()
	es, sql := m.rows(true, "now() + interval '1 second'", "order.placed")
	c := m.conn()
	m.must(run(m.t.Context(), c, `BEGIN`))
	m.insert(c, es, sql)
	i := slices.IndexFunc(m.parts, func(p *modelPart) bool { return es[0].id >= p.from && es[0].id < p.to })
	if i >= 0 {
		m.away = m.parts[i]
		m.must(run(m.t.Context(), c, `ALTER TABLE outbox_messages DETACH PARTITION `+m.away.name))
		m.must(run(m.t.Context(), c, fmt.Sprintf(`SELECT setval(pg_get_serial_sequence('outbox_messages', 'id'), greatest(%d, %d))`, m.away.to, es[len(es)-1].id)))
	}
	m.must(errors.Join(run(m.t.Context(), c, `COMMIT`), c.Close(m.t.Context())))
	for _, e := range es {
		e.committed = true
	}
	if i < 0 {
		return false
	}
	for _, e := range m.events[1:] {
		e.late = e.late || e.id >= m.away.from && e.id < m.away.to
	}
	m.commit(false, "now()", "order.placed")
	for _, x := range m.relays {
		m.settle(x)
	}
	time.Sleep(2 * time.Second) // for a step of the progress
	return m.attach()
}

func (m *model) attach() bool {
	m.t.Helper()
	if m.away == nil {
		return false
	}
	m.exec(fmt.Sprintf(`ALTER TABLE outbox_messages ATTACH PARTITION %s FOR VALUES FROM (%d) TO (%d)`, m.away.name, m.away.from, m.away.to))
	m.away = nil
	return true
}

// retain makes a pass of retention, which takes what is older than a millisecond. No row goes that is not stored.
func (m *model) retain() bool {
	m.t.Helper()
	if len(m.parts) == 0 {
		return false
	}
	m.endAll()
	for _, x := range m.relays {
		m.settle(x)
	}
	time.Sleep(2 * time.Second) // for a step of the progress
	x := m.any()
	box := modelTable()
	box.Where, box.Shard = x.where(), x.shard
	_, err := retention.Run(m.t.Context(), table.Config{URL: m.url, Settings: stream.Settings},
		retention.Options{Tables: []*outbox.Table{box}, DeleteAfter: time.Millisecond})
	m.must(err)
	times, dropped := m.stored(), false
	m.parts = slices.DeleteFunc(m.parts, func(p *modelPart) bool {
		gone := m.query1(`SELECT to_regclass($1)::text`, p.name) == "<nil>"
		for i, e := range m.events[1:] {
			if gone && e.id >= p.from && e.id < p.to && e.committed && !e.fails && times[i+1] == 0 {
				m.t.Errorf("event %d is not stored, and retention has dropped its row: %+v", i+1, *e)
			}
		}
		dropped = dropped || gone
		return gone
	})
	if dropped {
		m.did["partition dropped"]++
	}
	return true
}
