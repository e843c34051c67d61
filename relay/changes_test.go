package relay_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestChanges changes, between a relay's runs, what people change: names, tables, databases, conditions, slots, streams. Rows are
// committed at every step. After each run every row that the configuration covers is stored once, and in order.
//
// WALPOST_CHANGES_FOR=1h goes on with other seeds for that long, and adds a line for each world to the file that
// WALPOST_CHANGES_RESULTS names. WALPOST_CHANGES_SEED repeats one.
func TestChanges(t *testing.T) {
	t.Parallel()
	lasts, _ := time.ParseDuration(os.Getenv("WALPOST_CHANGES_FOR"))
	until := time.Now().Add(lasts)
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			seed, err := strconv.ParseUint(os.Getenv("WALPOST_CHANGES_SEED"), 10, 64)
			if err != nil {
				seed = rand.Uint64() >> 20
			}
			for ok := true; ok && !t.Failed(); {
				t.Run(fmt.Sprint(seed), func(t *testing.T) { newChanging(t, mark, seed).live(testenv.Size(t, 6, 40)) })
				seed = rand.Uint64() >> 20
				ok = time.Now().Before(until)
			}
		})
	}
}

// changing is a database, and the configuration of its relay, of which everything may change.
type changing struct {
	*rig
	seed                           uint64
	rng                            *rand.Rand
	mark                           outbox.Mark
	boxes                          []*changingBox
	events                         []*changingEvent // by number, from 1
	source, mode, initial, streamN string
	slots, serial, aside           int
	other                          *testenv.Postgres // where a dump is restored
	relay                          *process
	did                            map[string]int
	dir                            string
}

// changingBox is an outbox of the configuration.
type changingBox struct {
	schema, name, where string
	out                 bool // of the configuration
	aside               bool // its table does not fit
	now                 *changingTable
	before              []*changingTable // that had its name
}

// changingTable is a table, whatever it is called.
type changingTable struct {
	schema, name string
	// open: a relay with a condition (where) was killed. What it had stored and not marked is marked by one that covers the same rows.
	open  bool
	where string
}

func (c *changingTable) sql() string { return c.schema + "." + c.name }

type changingEvent struct {
	table     *changingTable
	kind      string
	aggregate int
	late      bool // due a second later
	covered   bool // by the configuration when a relay had settled everything
	begun     bool // it was there beside a relay that covers it
}

func newChanging(t *testing.T, mark outbox.Mark, seed uint64) *changing {
	t.Helper()
	settings := map[string]string{"wal_sender_timeout": "10s", "max_replication_slots": "20"}
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{Settings: settings}))
	c := &changing{
		rig: r, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), mark: mark, mode: "auto", streamN: "E1",
		events: []*changingEvent{nil}, did: map[string]int{}, dir: t.TempDir(),
	}
	t.Logf("WALPOST_CHANGES_SEED=%d", seed)
	r.exec(`CREATE SCHEMA app; CREATE TABLE outbox_others (LIKE outbox_messages INCLUDING ALL)`)
	for _, name := range []string{"outbox_messages", "outbox_others"} {
		c.boxes = append(c.boxes, &changingBox{schema: "public", name: name, now: &changingTable{schema: "public", name: name}})
		c.guard("public", name)
	}
	for _, name := range []string{"E1", "E2"} {
		r.createStream(func(s *natsjs.StreamConfig) {
			s.Name, s.Subjects, s.Duplicates = name, []string{strings.ToLower(name) + ".>"}, 100*time.Millisecond
		})
	}
	c.initial = c.pick(c.initials()...)
	return c
}

// initials are values of postgres.initial.
func (c *changing) initials() []string {
	if c.mark == outbox.MarkDelete {
		return []string{"", "pending"}
	}
	return []string{"", "pending", "none", "none"}
}

func (c *changing) pick(from ...string) string { return from[c.rng.IntN(len(from))] }

// guard has a table refuse what an append-only one refuses.
func (c *changing) guard(schema, name string) {
	if c.mark == outbox.MarkJournal {
		o := outbox.Table{Schema: schema, Name: name, Layout: outbox.Canonical().Journaled(), Mark: c.mark}
		c.exec(strings.Join(table.AppendOnlySQL(&o, "public."+table.AppendOnly), ";"))
	}
}

// configure writes the configuration.
func (c *changing) configure() string {
	c.t.Helper()
	type m = map[string]any
	var boxes []m
	for _, b := range c.boxes {
		if !b.out {
			boxes = append(boxes, m{"table": b.schema + "." + b.name, "mark": string(c.mark), "where": b.where})
		}
	}
	text, err := json.Marshal(m{
		"postgres": m{
			"initial": c.initial, "publication": "walpost_" + strconv.Itoa(c.serial), "url": c.url, "slot": c.cfg.Slot,
			"schema": "public", // walpost's tables stay where they are when the outbox goes to another schema
		},
		"source": c.source, "outboxes": boxes, "mode": c.mode, "fallback": m{"interval": "1s"},
		"nats": m{"stream": c.streamN, "subject": strings.ToLower(c.streamN) + ".{event_type}"},
	})
	c.must(err)
	path := filepath.Join(c.dir, fmt.Sprintf("%d.yaml", len(c.events)))
	c.must(os.WriteFile(path, text, 0o600))
	return path
}

// walpost runs a command.
func (c *changing) walpost(args ...string) {
	c.t.Helper()
	cmd := c.command(append(args, "--config", c.configure())...)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("walpost %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// insert commits rows, in any table.
func (c *changing) insert() {
	c.t.Helper()
	for range 1 + c.rng.IntN(3) {
		b := c.boxes[c.rng.IntN(len(c.boxes))]
		c.insertInto(b.now, 1+c.rng.IntN(40))
	}
}

func (c *changing) insertInto(to *changingTable, rows int) {
	c.t.Helper()
	var values []string
	for range rows {
		e := &changingEvent{
			table: to, kind: c.pick("placed", "paid", "failed"), aggregate: c.rng.IntN(8), late: c.rng.IntN(20) == 0,
		}
		due := "now()"
		if e.late {
			due = "now() + interval '1 s'"
		}
		e.begun = c.relay != nil && !c.relay.ended() && c.covers(e)
		values = append(values, fmt.Sprintf(`(1, 'order', %d, 'order.%s', '{"n": %d}', '%[3]d', %s)`, e.aggregate, e.kind, len(c.events), due))
		c.events = append(c.events, e)
	}
	c.exec(`INSERT INTO ` + to.sql() + ` (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id, available_at) VALUES ` +
		strings.Join(values, ","))
}

// start runs a relay. One that asks is answered.
func (c *changing) start() *process {
	c.t.Helper()
	for _, e := range c.events[1:] {
		e.begun = e.begun || c.covers(e)
	}
	for {
		p := c.launchAs(c.command("run", "--config", c.configure()))
		eventually(c.t, "the relay delivers, waits or ends", func() bool {
			state := p.state()
			return state == "streaming" || state == "polling" || state == "standby" || p.ended()
		})
		if !p.ended() {
			return p
		}
		end := string(p.logTail())
		switch {
		case strings.Contains(end, "hint: run `walpost migrate up`"):
			c.did["refused: not published"]++
			c.walpost("migrate", "up")
			continue
		case !strings.Contains(end, "`walpost outbox keep"):
			c.t.Fatalf("the relay ended: %s", end)
		case strings.Contains(end, "this database is a copy"):
			c.did["asked: a copy"]++
		default:
			c.did["asked: the first start"]++
		}
		c.keep()
	}
}

// keep answers what the relay asks.
func (c *changing) keep() {
	c.t.Helper()
	for _, b := range c.boxes {
		if !b.out {
			c.walpost("outbox", "keep", b.schema+"."+b.name)
		}
	}
}

// stop ends the relay's run, by a signal that it may answer or not.
func (c *changing) stop(kill bool) {
	c.t.Helper()
	if !kill {
		c.relay.terminate()
		return
	}
	c.did["relay killed"]++
	c.killed(c.relay)
}

func (c *changing) killed(p *process) {
	c.t.Helper()
	p.kill()
	for _, b := range c.boxes {
		if !b.out && !b.now.open {
			b.now.open, b.now.where = true, b.where
		}
	}
}

// storeUnmarked has a relay store rows that it cannot mark, and kills it.
func (c *changing) storeUnmarked() {
	c.t.Helper()
	c.did["stored and not marked"]++
	c.insert()
	lock, ctx := c.conn(), c.t.Context()
	c.must(run(ctx, lock, `BEGIN`))
	for _, b := range c.boxes {
		c.must(run(ctx, lock, `LOCK TABLE `+b.now.sql()+` IN SHARE MODE`))
	}
	c.must(run(ctx, lock, `LOCK TABLE outbox_journal IN SHARE MODE`))
	want := c.cover()
	want += c.strays()
	c.relay = c.start()
	eventually(c.t, "the rows are stored", func() bool { return c.messages() >= want })
	c.killed(c.relay)
	// What waits for the lock is not to go on without the relay.
	c.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'walpost'`)
	c.must(run(ctx, lock, `ROLLBACK`))
	c.must(lock.Close(ctx))
}

// cover has the rows that the configuration covers be covered, and returns how many ever were.
func (c *changing) cover() (n int) {
	for _, e := range c.events[1:] {
		if e.covered = e.covered || c.covers(e); e.covered {
			n++
		}
	}
	return n
}

func (c *changing) covers(e *changingEvent) bool {
	return slices.ContainsFunc(c.boxes, func(b *changingBox) bool {
		return e.table == b.now && !b.out && !b.aside && !strings.Contains(conditions[b.where], e.kind)
	})
}

// strays counts messages of rows that are not covered: a relay has stored them before their table was another one.
func (c *changing) strays() (n int) {
	for _, name := range []string{"E1", "E2"} {
		eachHeader(c.t, c.nats.URL(), name, func(_ uint64, h nats.Header) {
			event, err := strconv.Atoi(h.Get("ce-traceid"))
			if c.must(err); !c.events[event].covered {
				n++
			}
		})
	}
	return n
}

// conditions are those of the outboxes, with the kinds that they leave out.
var conditions = map[string]string{
	"": "", "event_type <> 'order.failed'": "failed", "event_type = 'order.placed'": "failed paid",
}

func (c *changing) messages() (n int) {
	js := c.js()
	for _, name := range []string{"E1", "E2"} {
		s, err := js.Stream(c.t.Context(), name)
		c.must(err)
		n += int(s.CachedInfo().State.Msgs)
	}
	return n
}

// settled waits until what is covered is stored and marked, and counts.
func (c *changing) settled() {
	c.t.Helper()
	want := c.cover()
	defer func() {
		if c.t.Failed() {
			c.t.Log(strings.Join(c.faults(), "\n"))
		}
	}()
	eventually(c.t, "everything that is covered is stored", func() bool {
		if c.relay.ended() {
			c.t.Fatalf("the relay ended: %s", c.relay.logTail())
		}
		for _, s := range c.relay.setAside() {
			if strings.Contains(s.Hint, "`walpost outbox keep") {
				c.did["asked: one outbox"]++
				c.keep()
			}
		}
		return c.messages() >= want
	})
	for _, b := range c.boxes {
		if b.out || b.aside {
			continue
		}
		pending := map[outbox.Mark]string{
			outbox.MarkUpdate: `processed_at IS NULL`, outbox.MarkDelete: `true`,
			outbox.MarkJournal: `NOT EXISTS (SELECT FROM outbox_journal j JOIN outbox_known k USING (outbox)
				WHERE k.table_oid = '` + b.now.sql() + `'::regclass AND j.ids @> e.id)`,
		}[c.mark]
		if b.where != "" {
			pending += " AND " + b.where
		}
		eventually(c.t, "everything that is covered is marked", func() bool {
			return c.count(`SELECT count(*) FROM `+b.now.sql()+` e WHERE `+pending) == 0
		})
		b.now.open = b.now.open && b.where != "" && b.where != b.now.where
	}
	c.compare()
}

// compare fails the test where the streams do not hold what was covered, once and in order.
func (c *changing) compare() {
	c.t.Helper()
	if faults := c.faults(); len(faults) > 0 {
		c.t.Fatalf("%d faults", len(faults))
	}
	log := string(c.relay.logText())
	for _, alarm := range []string{"events_lost"} {
		if strings.Contains(log, `"alarm":"`+alarm+`"`) {
			c.t.Fatalf("false alarm %s: %s", alarm, log)
		}
	}
}

// faults are what the streams hold and should not, and what they lack.
func (c *changing) faults() (faults []string) {
	c.t.Helper()
	type line struct {
		table     *changingTable
		aggregate int
		kind      string
	}
	c.did["lost"], c.did["doubled"], c.did["reordered"] = 0, 0, 0
	times := make([]int, len(c.events))
	ids := map[int][]string{} // of messages
	for _, name := range []string{"E1", "E2"} {
		last := map[line]int{}
		eachHeader(c.t, c.nats.URL(), name, func(seq uint64, h nats.Header) {
			n, err := strconv.Atoi(h.Get("ce-traceid"))
			c.must(err)
			e := c.events[n]
			times[n]++
			ids[n] = append(ids[n], fmt.Sprintf("%s %d %s via %s", name, seq, h.Get("Nats-Msg-Id"), h.Get("Walpost-Via")))
			at := line{e.table, e.aggregate, e.kind}
			if n < last[at] && !e.late && times[n] == 1 {
				c.did["reordered"]++
				faults = append(faults, fmt.Sprintf("reordered: event %d of %s follows %d in %s, message %d, via %s", n, e.table.sql(), last[at], name, seq, h.Get("Walpost-Via")))
			}
			if !e.late {
				last[at] = max(last[at], n)
			}
		})
	}
	for n, e := range c.events[1:] {
		switch got := times[n+1]; {
		case got == 0 && e.covered:
			c.did["lost"]++
			faults = append(faults, fmt.Sprintf("lost: event %d of %s", n+1, e.table.sql()))
		case got > 1:
			c.did["doubled"]++
			faults = append(faults, fmt.Sprintf("doubled: event %d of %s: %s", n+1, e.table.sql(), strings.Join(ids[n+1], ", ")))
		case got == 1 && !e.covered && !e.begun:
			faults = append(faults, fmt.Sprintf("not covered: event %d of %s: %s", n+1, e.table.sql(), strings.Join(ids[n+1], ", ")))
		}
	}
	return faults
}

// live makes changes, and in the end gives back to the outboxes all that they had.
func (c *changing) live(steps int) {
	c.t.Helper()
	all := changes()
	defer c.note(time.Now())
	c.relay = c.start()
	for range steps {
		c.step(all)
	}
	c.relay.terminate()
	for _, b := range c.boxes {
		b.out, b.where = false, ""
	}
	c.serial++
	for more := true; more; {
		c.relay = c.start()
		c.settled()
		c.stop(false)
		more = false
		for _, b := range c.boxes {
			left := func(t *changingTable) bool {
				return slices.ContainsFunc(c.events[1:], func(e *changingEvent) bool { return e.table == t && !e.covered })
			}
			if i := slices.IndexFunc(b.before, left); i >= 0 {
				c.swapBack(b, i)
				more = true
			}
		}
	}
	if n := c.cover(); n != len(c.events)-1 {
		c.t.Errorf("%d of %d events were covered", n, len(c.events)-1)
	}
}

// step makes one change, or two.
func (c *changing) step(all []change) {
	c.t.Helper()
	c.insert()
	if c.rng.IntN(2) == 0 {
		c.settled()
	}
	one := all[c.rng.IntN(len(all))]
	c.t.Logf("%s (%d events)", one.name, len(c.events)-1)
	did := false
	if one.asItRuns && c.rng.IntN(4) == 0 {
		did = one.do(c)
		c.insert()
		c.stop(c.rng.IntN(2) == 0)
	} else {
		if one.drained {
			c.settled()
		}
		kill := !one.drained && c.rng.IntN(2) == 0
		c.stop(kill)
		if kill && c.rng.IntN(2) == 0 {
			c.storeUnmarked()
		}
		c.insert()
		if !one.drained || !c.open() {
			did = one.do(c)
		}
	}
	if did {
		c.did[one.name]++
	}
	c.insert()
	c.relay = c.start()
	c.insert()
	c.settled()
}

// open reports whether a table may have rows that are stored and not marked.
func (c *changing) open() bool {
	for _, b := range c.boxes {
		if b.now.open || slices.ContainsFunc(b.before, func(t *changingTable) bool { return t.open }) {
			return true
		}
	}
	return false
}

// note writes what was done.
func (c *changing) note(began time.Time) {
	c.t.Helper()
	noteWorld(c.t, map[string]any{"seed": c.seed, "mark": c.mark, "events": len(c.events) - 1, "did": c.did}, began)
}

// noteWorld logs what was done, and appends it to the file that WALPOST_CHANGES_RESULTS names.
func noteWorld(t *testing.T, world map[string]any, began time.Time) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	world["seconds"], world["failed"] = int(time.Since(began).Seconds()), t.Failed()
	line, err := json.Marshal(world)
	must(err)
	t.Logf("%s", line)
	path := os.Getenv("WALPOST_CHANGES_RESULTS")
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(err)
	_, err = f.Write(append(line, '\n'))
	must(err)
	must(f.Close())
}
