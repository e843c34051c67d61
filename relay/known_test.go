package relay_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/verify"
)

// named is a rig whose outbox is renamed and replaced.
type named struct {
	*rig
	box  outbox.Table
	next int // the number of the next row
}

func newNamed(t *testing.T, mark outbox.Mark, mode relay.Mode) *named {
	t.Helper()
	r := newRig(t, testenv.SharedPostgres(t))
	n := &named{rig: r, box: *r.cfg.Outboxes[0], next: 1}
	n.box.Mark = mark
	if r.cfg.Mode = mode; mark == outbox.MarkJournal {
		n.box.Layout = n.box.Layout.Journaled()
	}
	n.appendOnly()
	n.configure()
	r.cfg.FallbackInterval = 200 * time.Millisecond
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	return n
}

func (n *named) appendOnly() {
	if n.box.Mark == outbox.MarkJournal {
		n.exec(strings.Join(table.AppendOnlySQL(&n.box, "public."+table.AppendOnly), ";"))
	}
}

// configure has the configuration follow.
func (n *named) configure() {
	box := n.box
	n.cfg.Outboxes = []*outbox.Table{&box}
}

// add commits rows.
func (n *named) add(rows int) {
	n.t.Helper()
	n.exec(strings.Replace(putSQL, "outbox_messages", n.box.SQL(), 1), "order.placed", n.next, n.next+rows-1)
	n.next += rows
}

// delivered waits until all rows are stored, once and in order.
func (n *named) delivered() {
	n.t.Helper()
	eventually(n.t, "all rows are stored", func() bool { return n.storedCount() >= uint64(n.next-1) })
	n.storedIs(1, n.next-1)
}

// marked waits until all rows of the present table are marked.
func (n *named) marked() {
	n.t.Helper()
	sql := `SELECT count(*) FROM ` + n.box.SQL() + ` e WHERE NOT EXISTS (SELECT FROM outbox_journal j WHERE j.ids @> e.id)`
	if n.box.Mark != outbox.MarkJournal {
		sql = `SELECT count(*) FROM ` + n.box.SQL() + ` WHERE processed_at IS NULL`
	}
	eventually(n.t, "all rows are marked", func() bool { return n.count(sql) == 0 })
}

// storedUnmarked commits rows, and has them stored and not marked when the relay has stopped.
func (n *named) storedUnmarked(rows int) {
	n.t.Helper()
	n.add(rows)
	ctx, lock := n.t.Context(), n.conn()
	n.must(run(ctx, lock, `BEGIN; SELECT FROM `+n.box.SQL()+` WHERE processed_at IS NULL FOR UPDATE`))
	x := n.start()
	n.delivered()
	x.halt()
	n.must(run(ctx, lock, `ROLLBACK`))
}

// TestRenamed: rows that were delivered before the table, its schema or the database got another name are not delivered
// again, nor are those that were stored and not marked yet.
func TestRenamed(t *testing.T) {
	t.Parallel()
	acts := map[string]func(*named){
		"the table": func(n *named) {
			n.exec(`ALTER TABLE ` + n.box.SQL() + ` RENAME TO events`)
			n.box.Name = "events"
		},
		"another schema": func(n *named) {
			n.exec(`CREATE SCHEMA app; ALTER TABLE ` + n.box.SQL() + ` SET SCHEMA app`)
			n.box.Schema, n.cfg.Own.Schema = "app", "public" // where walpost's tables stay
		},
		"the schema": func(n *named) {
			n.exec(`ALTER SCHEMA public RENAME TO app; CREATE SCHEMA public`)
			n.box.Schema = "app"
		},
		"the database": func(n *named) {
			name := n.query1(`SELECT current_database()::text`)
			n.disconnect()
			eventually(n.t, "the database is renamed", func() bool {
				n.must(n.pg.Exec(n.t.Context(), "postgres", fmt.Sprintf(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '%s'`, name)))
				return n.pg.Exec(n.t.Context(), "postgres", fmt.Sprintf(`ALTER DATABASE %s RENAME TO %[1]s_renamed`, name)) == nil
			})
			n.url = strings.Replace(n.url, "/"+name, "/"+name+"_renamed", 1)
			n.cfg.PostgresURL = n.url
		},
	}
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for name, act := range acts {
			t.Run(fmt.Sprintf("%s/%s", mark, name), func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, mark, relay.ModeAuto)
				x := n.start().streaming()
				n.add(100)
				n.delivered()
				n.marked()
				x.halt()
				if mark == outbox.MarkUpdate {
					n.storedUnmarked(50)
				}
				act(n)
				n.configure()
				n.duplicateWindowPasses(100 * time.Millisecond)
				x = n.start().streaming()
				n.add(20)
				n.delivered()
				if name != "the schema" { // the journal is another one's by its name in this test's SQL
					n.marked()
				}
				x.quiet("events_lost")
			})
		}
	}
}

// replace gives the table's name to another table, and returns what gives it back.
func (n *named) replace() (back func()) {
	n.t.Helper()
	n.exec(`ALTER TABLE ` + n.box.SQL() + ` RENAME TO before; CREATE TABLE ` + n.box.SQL() + ` (LIKE before INCLUDING ALL)`)
	n.appendOnly()
	n.publish()
	return func() {
		n.t.Helper()
		n.exec(`ALTER TABLE ` + n.box.SQL() + ` RENAME TO after; ALTER TABLE before RENAME TO ` + n.box.Name)
	}
}

func (n *named) publish() {
	n.t.Helper()
	if n.cfg.Mode != relay.ModePoll {
		n.exec(`ALTER PUBLICATION walpost ADD TABLE ` + n.box.SQL())
	}
}

// TestReplaced: another table under the outbox's name is another outbox. All its rows are delivered, also those with ids that
// were delivered before. When the first table has its name again, its marks count again.
func TestReplaced(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
			t.Run(fmt.Sprintf("%s/%s", mark, mode), func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, mark, mode)
				n.cfg.Initial = "pending"
				if mark != outbox.MarkDelete {
					n.cfg.Initial = "none"
				}
				x := n.start().working(modeOf(mode))
				n.add(50)
				n.delivered()
				n.marked()
				x.halt()
				back := n.replace()
				n.add(120)
				x = n.start().working(modeOf(mode))
				n.delivered()
				n.add(10)
				n.delivered()
				n.marked()
				x.halt()
				if id := n.stored()[170].Header.Get("Nats-Msg-Id"); !strings.Contains(id, "/public.outbox_messages%2F2/121/") {
					t.Errorf("message id %s", id)
				}
				back()
				n.add(5)
				n.start().working(modeOf(mode))
				n.delivered()
				n.add(5)
				n.delivered()
			})
		}
	}
}

// TestTableBecomesAPartition of a new table of its name, by the statements of docs/TABLES.md. It is the same outbox.
func TestTableBecomesAPartition(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/TABLES.md")
	if err != nil {
		t.Fatal(err)
	}
	_, statements, _ := strings.Cut(string(page), "**To partition it,**")
	_, statements, _ = strings.Cut(statements, "```sql\n")
	statements, _, ok := strings.Cut(statements, "```")
	if !ok {
		t.Fatal("docs/TABLES.md has no such statements")
	}
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for _, runs := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", mark, runs), func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, mark, relay.ModeAuto)
				x := n.start().streaming()
				n.add(100)
				n.delivered()
				n.marked()
				sql := statements
				if mark != outbox.MarkJournal {
					sql = regexp.MustCompile(`(?m)^(DROP TRIGGER|CREATE TRIGGER|ALTER TABLE \w+ ENABLE).*$`).ReplaceAllString(sql, "")
				}
				if !runs {
					x.halt()
					n.add(10)
				}
				n.exec(sql)
				n.add(10)
				if !runs {
					n.start().streaming()
				}
				n.delivered()
				n.duplicateWindowPasses(100 * time.Millisecond)
				n.add(10)
				n.delivered()
				n.marked()
				if id := n.stored()[n.next-2].Header.Get("Nats-Msg-Id"); !strings.Contains(id, "/public.outbox_messages/") {
					t.Errorf("message id %s", id)
				}
			})
		}
	}
}

func modeOf(m relay.Mode) relay.Mode {
	if m == relay.ModePoll {
		return m
	}
	return relay.ModeStream
}

// TestReplacedBesideTheRelay: the table is replaced while the relay runs, and rows are inserted at once, some of them for
// later.
func TestReplacedBesideTheRelay(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
			t.Run(fmt.Sprintf("%s/%s", mark, mode), func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, mark, mode)
				n.start().working(modeOf(mode))
				n.add(50)
				n.delivered()
				n.marked()
				total := 50
				for i := range 4 {
					if i%2 == 0 {
						n.exec(fmt.Sprintf(`ALTER TABLE %s RENAME TO before%d; CREATE TABLE %[1]s (LIKE before%[2]d INCLUDING ALL)`, n.box.SQL(), i))
						n.appendOnly()
						n.publish()
					} else { // as migrate down and up do
						n.exec(fmt.Sprintf(`CREATE TABLE copy (LIKE %s INCLUDING ALL); DROP TABLE %[1]s; ALTER TABLE copy RENAME TO %s`, n.box.SQL(), n.box.Name))
						n.appendOnly()
						n.publish()
					}
					n.exec(`INSERT INTO ` + n.box.SQL() + ` (aggregate_type, aggregate_id, event_type, payload, available_at)
						SELECT 'order', 1, 'order.placed', '{"n": 0}', now() + interval '2 s' FROM generate_series(1, 30)`)
					n.exec(strings.Replace(putSQL, "outbox_messages", n.box.SQL(), 1), "order.placed", 1, 60)
					total += 90
					eventually(t, "all rows are stored", func() bool { return n.storedCount() >= uint64(total) })
					n.marked()
				}
				if got := n.storedCount(); got != uint64(total) {
					t.Errorf("%d messages are stored, want %d", got, total)
				}
			})
		}
	}
}

// TestConditionsHaveTheirOwnProgress: relays share a table by where. One that begins late, was down for a while or is widened
// delivers all its rows.
func TestConditionsHaveTheirOwnProgress(t *testing.T) {
	t.Parallel()
	n := newNamed(t, outbox.MarkJournal, relay.ModeAuto)
	here := n.cfg
	part := func(kind string) *rig {
		r := *n.rig
		box := n.box
		box.Where = `event_type = 'order.` + kind + `'`
		r.cfg = here
		r.cfg.Slot, r.cfg.Publication, r.cfg.Outboxes = here.Slot+"_"+kind, "walpost_"+kind, []*outbox.Table{&box}
		r.cfg.Stream.Name, r.cfg.Stream.Pattern, r.cfg.Subject = kind, kind+".>", kind+".{event_type}"
		t.Cleanup(func() { r.dropSlot(r.cfg.Slot) })
		return &r
	}
	put := func(kind string, from, to int) {
		n.exec(strings.Replace(putSQL, "outbox_messages", n.box.SQL(), 1), "order."+kind, from, to)
	}
	count := func(kind string) int {
		s, err := n.js().Stream(t.Context(), kind)
		if err != nil {
			return 0
		}
		info, err := s.Info(t.Context())
		n.must(err)
		return int(info.State.Msgs)
	}
	progressed := func(kind string) {
		eventually(t, "the progress passes all rows", func() bool {
			return n.count(`SELECT count(*) FROM outbox_known WHERE condition LIKE $1 AND `+testenv.Settled+` = (SELECT max(id) FROM outbox_messages)`, "%"+kind+"%") == 1
		})
	}
	placed, paid := part("placed"), part("paid")
	x := placed.start().streaming()
	for i := range 20 {
		put("placed", i, i)
		put("paid", i, i)
	}
	progressed("placed")
	late := paid.start().streaming()
	eventually(t, "the late one delivers its rows", func() bool { return count("paid") == 20 })
	late.halt()
	for i := range 15 {
		put("placed", 20+i, 20+i)
		put("paid", 20+i, 20+i)
	}
	progressed("placed")
	late = paid.start().streaming()
	eventually(t, "the other one delivers what it has missed", func() bool { return count("paid") == 35 })
	late.halt()
	x.halt()
	put("failed", 1, 10)
	put("placed", 35, 40)
	x = placed.start().streaming()
	progressed("placed")
	x.halt()
	placed.cfg.Outboxes[0].Where = `event_type IN ('order.placed', 'order.failed')`
	placed.cfg.Publication += "_wide"
	placed.start()
	eventually(t, "a widened condition finds its rows", func() bool { return count("placed") == 41+10 })
	if n := count("paid"); n != 35 {
		t.Errorf("%d paid, want 35", n)
	}
}

// TestDividedAndMerged: an outbox is divided between two relays with streams of their own, and one of them takes it all again. Each
// row is stored once, and what the other one has delivered does not look lost.
func TestDividedAndMerged(t *testing.T) {
	t.Parallel()
	type part struct {
		where string
		shard outbox.Shard
	}
	halves := map[string][2]part{
		"where": {{where: "event_type = 'order.placed'"}, {where: "event_type <> 'order.placed'"}},
		"shard": {{shard: outbox.Shard{Index: 1, Of: 2}}, {shard: outbox.Shard{Index: 2, Of: 2}}},
	}
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		for by, parts := range halves {
			t.Run(fmt.Sprintf("%s/%s", mark, by), func(t *testing.T) {
				t.Parallel()
				testDividedAndMerged(newNamed(t, mark, relay.ModeAuto), func(r *rig, i int) *rig {
					r.fit(parts[i].where, parts[i].shard)
					r.cfg.Publication += fmt.Sprint(i)
					return r
				})
			})
		}
	}
}

// putTypes commits 20 rows behind a number, of two event types by turns, and returns the last one's number.
func (n *named) putTypes(behind int) (last int) {
	n.t.Helper()
	n.exec(strings.Replace(putSQL, "1, $1", "n % 10, $1::text || (ARRAY['placed', 'paid'])[1 + n % 2]", 1), "order.", behind+1, behind+20)
	return behind + 20
}

func testDividedAndMerged(n *named, half func(*rig, int) *rig) {
	t := n.t
	n.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
	to := 0
	put := func() { to = n.putTypes(to) }
	delivered := func() {
		t.Helper()
		eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) >= to })
		n.marked()
	}
	x := n.start().streaming()
	put()
	delivered()
	for range 2 {
		put()
		x.halt()
		put()
		x = half(n.beside(""), 0).start().streaming()
		y := half(n.beside("_b"), 1).toOther().start().streaming()
		put()
		delivered()
		put()
		x.quiet("events_lost")
		x.halt()
		y.quiet("events_lost")
		y.halt()
		put()
		x = n.start().streaming()
		put()
		delivered()
		x.quiet("events_lost")
	}
	if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, to)) {
		t.Errorf("stored %d messages %s", len(got), brief(got))
	}
}

// TestRestoredTable: the table is dropped and restored from a dump. Its rows count as delivered if an operator says that it is
// the same outbox, and are delivered again if not.
func TestRestoredTable(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{true, false} {
		n := newNamed(t, outbox.MarkJournal, relay.ModeAuto)
		x := n.start().streaming()
		n.add(50)
		n.delivered()
		n.marked()
		x.halt()
		n.exec(`CREATE TABLE dump (LIKE outbox_messages INCLUDING ALL); INSERT INTO dump OVERRIDING SYSTEM VALUE TABLE outbox_messages;
			SELECT setval(pg_get_serial_sequence('dump', 'id'), 50); DROP TABLE outbox_messages; ALTER TABLE dump RENAME TO outbox_messages`)
		n.appendOnly()
		n.publish()
		if keep {
			n.keep()
		}
		n.duplicateWindowPasses(100 * time.Millisecond)
		n.start().streaming()
		n.add(10)
		if keep {
			n.delivered()
			continue
		}
		eventually(t, "everything is delivered", func() bool { return n.storedCount() >= 110 })
		n.storedIs(1, 50, 1, 60)
	}
}

// keep says that the table is the outbox that its name says, as walpost outbox keep does.
func (n *named) keep() {
	n.t.Helper()
	db, err := table.Open(n.t.Context(), table.Config{URL: n.url, Slot: n.cfg.Slot})
	n.must(err)
	defer db.Close()
	box := *n.cfg.Outboxes[0]
	n.must(db.Bind(n.t.Context(), &box))
	n.must(db.Keep(n.t.Context(), &box, "restored"))
}

// TestCopiedDatabase: a relay in a copy of the database asks while the first one exists. In another database that a dump has
// filled, and in a copy whose original is gone, the table's name tells the outbox, and nothing is delivered again.
func TestCopiedDatabase(t *testing.T) {
	t.Parallel()
	for _, gone := range []bool{false, true} {
		n := newNamed(t, outbox.MarkJournal, relay.ModePoll)
		n.cfg.Source = "shop"
		x := n.start().working(relay.ModePoll)
		n.add(50)
		n.delivered()
		n.marked()
		x.halt()
		n.exec(`ALTER TABLE outbox_messages RENAME TO events`)
		n.box.Name = "events"
		n.configure()
		x = n.start().working(relay.ModePoll) // the name is noted
		n.add(10)
		n.delivered()
		x.halt()
		name := n.copyDatabase(gone)
		if !gone {
			x = n.start()
			x.ends()
			if x.err == nil || !strings.Contains(x.err.Error(), "this database is a copy of "+name) {
				t.Fatalf("the relay ended with %v", x.err)
			}
			n.keep()
		}
		n.duplicateWindowPasses(100 * time.Millisecond)
		n.start().working(relay.ModePoll)
		n.add(10)
		n.delivered()
		n.marked()
	}
}

// copyDatabase has the relay be of a copy of the database from now on, and returns the name of the first one.
func (n *named) copyDatabase(gone bool) (name string) {
	n.t.Helper()
	name = n.query1(`SELECT current_database()::text`)
	admin := func(sql string) error { return n.pg.Exec(n.t.Context(), "postgres", fmt.Sprintf(sql, name)) }
	n.disconnect()
	eventually(n.t, "the database is copied", func() bool {
		n.must(admin(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '%s'`))
		return admin(`CREATE DATABASE %[1]s_copy TEMPLATE %[1]s`) == nil
	})
	if gone {
		n.must(admin(`DROP DATABASE %s WITH (FORCE)`))
	}
	n.url = strings.Replace(n.url, "/"+name, "/"+name+"_copy", 1)
	n.cfg.PostgresURL = n.url
	return name
}

// TestReplacedThenCopied: a table was replaced, and then the database was copied. Both tables are the outboxes there that they
// were, also the one without the name.
func TestReplacedThenCopied(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for _, gone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/gone=%t", mark, gone), func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, mark, relay.ModeAuto)
				n.cfg.Source = "shop"
				work := func(rows int) {
					t.Helper()
					x := n.start().streaming()
					n.add(rows)
					n.delivered()
					n.marked()
					x.quiet("events_lost")
					x.halt()
				}
				work(50)
				if mark == outbox.MarkUpdate {
					n.storedUnmarked(20)
				}
				back := n.replace()
				work(30)
				n.dropSlot(n.cfg.Slot)
				n.copyDatabase(gone)
				keep := func() {
					if !gone { // a relay would ask for it
						n.keep()
					}
				}
				keep()
				n.duplicateWindowPasses(100 * time.Millisecond)
				n.add(100)
				work(10)
				back()
				keep()
				n.add(5)
				work(5)
			})
		}
	}
}

// TestKeepOfAnOlderDump: a table with mark journal comes back from a dump without the rows that were delivered last. Its next
// rows would have their ids: the relay says what to do, and does not count them as delivered.
func TestKeepOfAnOlderDump(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNamed(t, outbox.MarkJournal, mode)
			x := n.start().working(mode)
			n.add(50)
			n.delivered()
			n.exec(`CREATE TABLE dump AS SELECT * FROM ` + n.box.SQL())
			n.add(10)
			n.delivered()
			n.marked()
			x.halt()
			n.exec(`CREATE TABLE model (LIKE ` + n.box.SQL() + ` INCLUDING ALL); DROP TABLE ` + n.box.SQL() + `; ALTER TABLE model RENAME TO ` + n.box.Name + `;
				INSERT INTO ` + n.box.SQL() + ` OVERRIDING SYSTEM VALUE SELECT * FROM dump`)
			setval := func(last int) {
				t.Helper()
				n.query1(`SELECT setval(pg_get_serial_sequence($1, 'id'), $2)::text`, n.box.SQL(), last)
			}
			setval(50)
			n.appendOnly()
			n.publish()
			n.keep()
			x = n.start()
			x.ends()
			if x.err == nil || !strings.Contains(x.err.Error(), "stands at 50, and rows up to id 60 are delivered") {
				t.Fatalf("the start ends with %v", x.err)
			}
			setval(60)
			x = n.start().working(mode)
			n.add(5)
			n.delivered()
			x.halt()
		})
	}
}

// TestJoinedAndThenLost: an outbox is divided and joined again and again, and then messages of several of these times are lost. They
// are delivered again, and what the other half has delivered is not.
func TestJoinedAndThenLost(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			n, to := newNamed(t, mark, relay.ModeAuto), 0
			n.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
			stored := func() {
				t.Helper()
				eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) >= to })
				n.marked()
				if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, to)) {
					t.Errorf("stored %d messages, want %d: %s", len(got), to, brief(got))
				}
			}
			while := func(runs ...*running) {
				t.Helper()
				to = n.putTypes(to)
				stored()
				for _, x := range runs {
					x.halt()
				}
			}
			a, b := n.beside(""), n.beside("_b").toOther()
			a.fit("event_type = 'order.placed'", outbox.Shard{})
			a.cfg.Publication += "0"
			b.fit("event_type <> 'order.placed'", outbox.Shard{})
			b.cfg.Publication += "1"
			while(n.start().streaming())
			for range 2 {
				while(a.start().streaming(), b.start().streaming())
				while(n.start().streaming())
			}
			report := n.verify()
			n.finds(report, nil)
			s, err := n.js().Stream(t.Context(), "EVENTS")
			n.must(err)
			lose := func(from, to uint64) {
				t.Helper()
				for seq := from; seq <= to; seq++ {
					n.must(s.DeleteMsg(t.Context(), seq))
				}
			}
			// In the stream are 20, 10, 20, 10, 20 messages.
			lose(18, 18)
			lose(28, 28)
			report = n.verify()
			n.finds(report, map[verify.Kind]int64{verify.Missing: 2})
			if notes := strings.Join(report.Notes, "\n"); !strings.Contains(notes, "20 rows of") ||
				!strings.Contains(notes, "while they were delivered to stream OTHER") {
				t.Errorf("notes %q", notes)
			}
			x := n.start().streaming()
			stored()
			x.halt()
			lose(35, 80)
			while(n.start().streaming())
			n.finds(n.verify(), nil)
		})
	}
}

// TestDividedThenChanged: the parts of an outbox are joined again when its rows do not fit the conditions any more, or these cannot be
// computed. What the other half has delivered is not delivered again, and what the whole had is, if it is lost.
func TestDividedThenChanged(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for name, code := range map[string]int{"fits none": 3, "cannot be computed": 2} {
			t.Run(string(mark)+"/"+name, func(t *testing.T) {
				t.Parallel()
				n, to := newNamed(t, mark, relay.ModeAuto), 0
				n.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
				n.exec(`CREATE SEQUENCE codes; ALTER TABLE ` + n.box.SQL() + ` ADD code int NOT NULL DEFAULT nextval('codes') % 2`)
				while := func(runs ...*running) {
					t.Helper()
					to = n.putTypes(to)
					eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) >= to })
					n.marked()
					for _, x := range runs {
						x.halt()
					}
				}
				a, b := n.beside(""), n.beside("_b").toOther()
				a.fit("1 / (2 - code) = 0", outbox.Shard{})
				a.cfg.Publication += "0"
				b.fit("1 / (2 - code) = 1", outbox.Shard{})
				b.cfg.Publication += "1"
				while(n.start().streaming())
				while(a.start().streaming(), b.start().streaming())
				n.exec(`DROP PUBLICATION ` + a.cfg.Publication + `; DROP PUBLICATION ` + b.cfg.Publication)
				if mark == outbox.MarkJournal {
					n.exec(`ALTER TABLE ` + n.box.SQL() + ` DISABLE TRIGGER USER`)
				}
				n.exec(`UPDATE ` + n.box.SQL() + fmt.Sprintf(` SET code = %d`, code))
				if mark == outbox.MarkJournal {
					n.exec(`ALTER TABLE ` + n.box.SQL() + ` ENABLE ALWAYS TRIGGER outbox_no_update; ALTER TABLE ` + n.box.SQL() + ` ENABLE ALWAYS TRIGGER outbox_no_truncate`)
				}
				s, err := n.js().Stream(t.Context(), "EVENTS")
				n.must(err)
				n.must(s.DeleteMsg(t.Context(), 18))
				while(n.start().streaming())
				n.finds(n.verify(), nil)
				if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, to)) {
					t.Errorf("stored %d messages, want %d: %s", len(got), to, brief(got))
				}
			})
		}
	}
}

// TestMovedWithinASecond: the marks have whole seconds, and an outbox goes to another stream and back within one.
func TestMovedWithinASecond(t *testing.T) {
	t.Parallel()
	n, to := newNamed(t, outbox.MarkUpdate, relay.ModePoll), 0
	n.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
	n.exec(`ALTER TABLE outbox_messages ALTER COLUMN processed_at TYPE timestamptz(0)`)
	b := n.beside("").toOther()
	for i := range 8 {
		x := []*rig{n.rig, b}[i%2].start().working(relay.ModePoll)
		to = n.putTypes(to)
		eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) >= to })
		n.marked()
		x.halt()
		x.quiet("events_lost")
	}
	if got := n.numbersIn("EVENTS", "OTHER"); !slices.Equal(got, span(1, to)) {
		t.Errorf("stored %d messages, want %d: %s", len(got), to, brief(got))
	}
}

// TestArchivedOfParts: the parts of an outbox have streams of their own, and their rows are archived. verify of one finds what is lost
// of its own, and leaves out the other's.
func TestArchivedOfParts(t *testing.T) {
	t.Parallel()
	n := newNamed(t, outbox.MarkUpdate, relay.ModeAuto)
	n.createStream(func(c *natsjs.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other.>"} })
	a, b := n.beside(""), n.beside("_b").toOther()
	a.fit("event_type = 'order.placed'", outbox.Shard{})
	b.fit("event_type <> 'order.placed'", outbox.Shard{})
	b.cfg.Publication += "1"
	a.start().streaming()
	b.start().streaming()
	n.putTypes(0)
	eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) == 20 })
	n.marked()
	n.archiveOldest(15)
	n.putTypes(20)
	eventually(t, "all rows are stored", func() bool { return len(n.numbersIn("EVENTS", "OTHER")) == 40 })
	n.marked()
	for _, x := range []*rig{a, b} {
		x.finds(x.verify(), nil)
	}
	s, err := n.js().Stream(t.Context(), "EVENTS")
	n.must(err)
	n.must(s.DeleteMsg(t.Context(), 2))
	n.must(s.DeleteMsg(t.Context(), 12))
	a.finds(a.verify(), map[verify.Kind]int64{verify.Missing: 2})
	b.finds(b.verify(), nil)
}
