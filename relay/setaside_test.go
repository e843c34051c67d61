package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// misfit makes a table one that does not fit, and puts that right. Meanwhile rows are inserted into the table,
// whose payload is that column.
type misfit struct {
	name, do, undo, table, payload, says string
	mark                                 outbox.Mark
}

const public = "public.outbox_messages"

var misfits = []misfit{
	{
		"renamed", `ALTER TABLE public.outbox_messages RENAME TO away`,
		`ALTER TABLE public.away RENAME TO outbox_messages`, "public.away", "payload", "does not exist", outbox.MarkUpdate,
	},
	{
		"column renamed", `ALTER TABLE public.outbox_messages RENAME payload TO body`,
		`ALTER TABLE public.outbox_messages RENAME body TO payload`, public, "body", `"payload"`, outbox.MarkUpdate,
	},
	{
		"trigger dropped", `DROP TRIGGER outbox_no_update ON public.outbox_messages`, "", public, "payload",
		"no trigger refuses every UPDATE", outbox.MarkJournal,
	},
	{
		"generated column", `ALTER TABLE public.outbox_messages DROP COLUMN trace_id;
			ALTER TABLE public.outbox_messages ADD COLUMN trace_id text GENERATED ALWAYS AS (event_type) STORED`,
		`ALTER TABLE public.outbox_messages ALTER trace_id DROP EXPRESSION`, public, "payload", `"trace_id"`, outbox.MarkDelete,
	},
	{
		"column for failures renamed", `ALTER TABLE public.outbox_messages RENAME attempts TO tries`,
		`ALTER TABLE public.outbox_messages RENAME tries TO attempts`, public, "payload", `"attempts"`, outbox.MarkUpdate,
	},
	{
		"no index", `ALTER TABLE public.outbox_messages DROP CONSTRAINT outbox_messages_pkey`,
		`ALTER TABLE public.outbox_messages ADD PRIMARY KEY (id)`, public, "payload", "no index", outbox.MarkDelete,
	},
	{
		"another schema", `CREATE SCHEMA elsewhere; ALTER TABLE public.outbox_messages SET SCHEMA elsewhere`,
		`ALTER TABLE elsewhere.outbox_messages SET SCHEMA public`, "elsewhere.outbox_messages", "payload",
		"does not exist", outbox.MarkJournal,
	},
	{
		"replica identity", `ALTER TABLE public.outbox_messages REPLICA IDENTITY NOTHING`,
		`ALTER TABLE public.outbox_messages REPLICA IDENTITY DEFAULT`, public, "payload", "does not have a replica identity", outbox.MarkUpdate,
	},
}

// TestSetAside: a table is changed so that it does not fit. Its outbox is set aside alone, in a relay that runs and in one
// that starts. When the table fits again, its rows are delivered once and in order.
func TestSetAside(t *testing.T) {
	t.Parallel()
	for i, m := range testenv.Some(t, 4, misfits...) {
		for _, mode := range testenv.Some(t, 1, [][]relay.Mode{{relay.ModeAuto, relay.ModePoll}, {relay.ModePoll, relay.ModeAuto}}[i%2]...) {
			t.Run(m.name+" "+string(mode), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.cfg.Mode, r.cfg.FallbackInterval = mode, 500*time.Millisecond
				r.addSecond()
				if r.markWith(m.mark); m.undo == "" {
					m.undo = strings.Join(table.AppendOnlySQL(r.cfg.Outboxes[0], "public."+table.AppendOnly), ";")
				}
				n := 0
				insert := func(into, payload string) {
					t.Helper()
					for _, of := range [][2]string{{into, payload}, {"public.second_outbox", "payload"}} {
						r.exec(fmt.Sprintf(`INSERT INTO %s (aggregate_type, aggregate_id, event_type, %s)
							SELECT 'order', $1, 'order.placed', jsonb_build_object('n', n) FROM generate_series($2::int, $3::int) n ORDER BY n`,
							of[0], of[1]), map[bool]int{true: 1, false: 2}[of[0] == into], n+1, n+10)
					}
					n += 10
				}
				stored := func(aggregate string) (n int) {
					for _, m := range r.stored() {
						if m.Header.Get("ce-aggregateid") == aggregate {
							n++
						}
					}
					return n
				}
				flows := func() {
					t.Helper()
					eventually(t, "the second outbox is delivered", func() bool { return stored("2") == n })
				}
				x := r.start().working(mode)
				insert(public, "payload")
				r.pending(0)
				flows()
				r.exec(m.do)
				insert(m.table, m.payload)
				if a := x.alarmed("table_unfit"); !contains(a["error"], m.says) {
					t.Errorf("the alarm does not say why: %v", a)
				}
				flows()
				eventually(t, "the status names the outbox", func() bool {
					aside := x.Status().SetAside
					return len(aside) == 1 && aside[0].Outbox == public && strings.Contains(aside[0].Because, m.says)
				})
				eventually(t, "the relay is ready", func() bool { return x.Ready() == nil })
				before := stored("1") // the WAL may have brought rows before the change was seen
				insert(m.table, m.payload)
				flows()
				x.halt()
				x.quiet("no_progress", "row_unsettled", "slot_given_up", "slot_not_made", "missed_rows")
				insert(m.table, m.payload)
				x = r.start().working(mode)
				x.alarmed("table_unfit")
				flows()
				if mode == relay.ModeAuto {
					r.passes(r.here())
				}
				insert(m.table, m.payload)
				flows()
				if n := stored("1"); n != before {
					t.Errorf("%d rows of the outbox that was set aside are stored, %d before", n, before)
				}
				r.exec(m.undo)
				insert(public, "payload")
				flows()
				eventually(t, "the rows that waited are delivered", func() bool { return stored("1") >= n })
				x.over("table_unfit")
				r.inOrder(2 * n)
				if len(x.Status().SetAside) != 0 {
					t.Errorf("set aside: %+v", x.Status().SetAside)
				}
				x.quietBut()
				x.quiet("no_progress", "row_unsettled", "slot_given_up", "slot_not_made", "unpublished")
				x.halt()
			})
		}
	}
}

// TestSetAsideAlone: the only outbox of a relay is set aside. The relay is not ready, says why, and its slot keeps nothing;
// a relay that starts ends with the reason, and so does one that is to run once.
func TestSetAsideAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.exec(`ALTER TABLE outbox_messages RENAME attempts TO tries`)
	r.put(4, 6)
	const lacks = `table public.outbox_messages lacks what layout "canonical" needs: "attempts"`
	eventually(t, "the relay is not ready", func() bool {
		err := x.Ready()
		return err != nil && err.Error() == "every outbox is set aside: "+lacks
	})
	r.passes(r.here())
	r.exec(`ALTER TABLE outbox_messages RENAME tries TO attempts`)
	r.put(7, 9)
	r.pending(0)
	r.storedIs(1, 9)
	x.quiet("missed_rows", "no_progress", "row_unsettled", "slot_given_up")
	x.halt()
	r.exec(`ALTER TABLE outbox_messages RENAME attempts TO tries`)
	r.put(10, 12)
	for _, r.cfg.Once = range []bool{false, true} {
		x = r.start()
		if x.ends(); x.err == nil || x.err.Error() != lacks {
			t.Errorf("the relay ended with %v", x.err)
		}
	}
	r.exec(`ALTER TABLE outbox_messages RENAME tries TO attempts`)
	r.onceSays(3, 0, 0, 0)
	r.storedIs(1, 12)
}

// TestOnceWithoutOneSetAside: a relay that runs once delivers the outboxes that fit, and fails.
func TestOnceWithoutOneSetAside(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	r.cfg.Once = true
	r.start().ends()
	r.put(1, 3)
	r.exec(`ALTER TABLE outbox_messages RENAME payload TO body;
		INSERT INTO second_outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 2, 'order.placed', '{"n": 4}')`)
	x := r.start()
	if x.ends(); x.err == nil || !strings.Contains(x.err.Error(), `set aside: table public.outbox_messages lacks`) {
		t.Errorf("the relay ended with %v", x.err)
	}
	r.storedIs(4, 4)
	r.exec(`ALTER TABLE outbox_messages RENAME body TO payload`)
	r.start().ends()
	r.storedIs(4, 4, 1, 3)
}

// TestRenamedIsSetAside: a table was renamed, the configuration has followed, and the table is not there any more. Its outbox,
// which has the table's first name, is set aside by a start, too.
func TestRenamedIsSetAside(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	r.start().streaming().halt()
	r.exec(`ALTER TABLE outbox_messages RENAME TO events`)
	r.cfg.Outboxes[0].Name = "events"
	n := 0
	put := func(into string) {
		t.Helper()
		r.exec(strings.Replace(putSQL, "outbox_messages", into, 1), "order.placed", n+1, n+3)
		r.putSecond(n+4, n+6)
		n += 6
		if into == "events" {
			eventually(t, "all rows are delivered", func() bool { return r.storedCount() >= uint64(n) })
			r.inOrder(n)
		}
	}
	x := r.start().streaming()
	put("events")
	r.exec(`ALTER TABLE events RENAME TO away`)
	x.alarmed("table_unfit")
	put("away")
	x.halt()
	x = r.start().streaming()
	x.alarmed("table_unfit")
	put("away")
	r.exec(`ALTER TABLE away RENAME TO events`)
	put("events")
	x.over("table_unfit")
	x.quietBut()
	x.halt()
}

// TestFirstStartIsRefused: an outbox that was not delivered yet, and does not fit, ends a start, although there is
// another outbox that could be delivered.
func TestFirstStartIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming().halt()
	r.addSecond()
	r.exec(`ALTER TABLE second_outbox DROP COLUMN event_type`)
	x := r.start()
	if x.ends(); x.err == nil || !strings.Contains(x.err.Error(), `table public.second_outbox lacks`) {
		t.Errorf("the relay ended with %v", x.err)
	}
}

// TestStartWaitsToSetAside: a start cannot read whether the outbox that does not fit was delivered before. It waits for that.
func TestStartWaitsToSetAside(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	r.start().streaming().halt()
	r.exec(`ALTER TABLE outbox_messages RENAME payload TO body`)
	lock, err := r.conn().Begin(t.Context())
	r.must(err)
	_, err = lock.Exec(t.Context(), `LOCK TABLE outbox_sent`)
	r.must(err)
	x := r.start()
	const waits = `SELECT count(*) FROM pg_locks WHERE relation = 'outbox_sent'::regclass AND NOT granted`
	for want := range 4 { // it is refused the lock, and asks again
		eventually(t, "the start asks for the lock, or was refused it", func() bool { return r.count(waits) == (want+1)%2 })
	}
	r.must(lock.Rollback(t.Context()))
	x.streaming()
	r.putSecond(1, 3)
	r.storedIs(1, 3)
}

// TestLockedIsSetAside: a table is locked when a relay starts, or takes the lock again. The other outbox is delivered meanwhile.
func TestLockedIsSetAside(t *testing.T) {
	t.Parallel()
	for i, where := range []string{"", "event_type <> 'none'"} {
		for _, starts := range testenv.Some(t, 1, [][]bool{{true, false}, {false, true}}[i]...) {
			t.Run(fmt.Sprintf("%s starts %t", where, starts), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{})) // an open transaction keeps others' outboxes from joining
				r.cfg.FallbackInterval = 500 * time.Millisecond
				r.addSecond()
				r.cfg.Outboxes[0].Where = where
				x := r.start().streaming()
				r.put(1, 3)
				r.pending(0)
				r.putSecond(101, 103)
				if starts {
					x.halt()
				}
				lock, err := r.conn().Begin(t.Context())
				r.must(err)
				_, err = lock.Exec(t.Context(), `LOCK TABLE outbox_messages`)
				r.must(err)
				if starts {
					x = r.start()
				} else {
					r.exec(`SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'`)
				}
				if a := x.alarmed("table_unfit"); !contains(a["error"], "lock timeout") || !contains(a["hint"], "has a lock on the table") {
					t.Errorf("the alarm does not say why: %v", a)
				}
				r.putSecond(104, 106)
				r.must(lock.Rollback(t.Context()))
				r.put(4, 6)
				r.pending(0)
				x.over("table_unfit")
				r.joined(2)
				r.inOrder(12)
				x.quietBut()
				x.halt()
			})
		}
	}
}

// TestQuestionSetsAside: nothing tells whether the next start of an outbox is the first one. It waits for an answer, and the
// other outbox is delivered.
func TestQuestionSetsAside(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{true, false} {
		r := newRig(t, testenv.SharedPostgres(t))
		r.cfg.Initial, r.cfg.Source = "none", "shop"
		r.addSecond()
		r.start().streaming().halt()
		r.exec(`DELETE FROM outbox_sent WHERE outbox = 'public.outbox_messages'`)
		r.put(1, 10)
		x := r.start().streaming()
		if a := x.alarmed("table_unfit"); !contains(a["error"], "nothing tells whether this is the first start") || !contains(a["hint"], "walpost outbox keep") {
			t.Errorf("the alarm does not ask: %v", a)
		}
		r.putSecond(101, 110)
		r.storedIs(101, 110)
		r.noteSent(r.cfg.Outboxes[0], keep)
		x.over("table_unfit")
		eventually(t, "the outbox is delivered", func() bool { return len(x.Status().SetAside) == 0 })
		x.streaming()
		r.joined(2)
		r.put(11, 20)
		r.pending(0)
		if keep {
			r.storedIs(101, 110, 1, 20)
		} else {
			r.storedIs(101, 110, 11, 20)
		}
		x.quietBut()
		x.halt()
	}
}

// TestReplayOfOneSetAside: a replay of an outbox that is set aside waits, and one of another outbox does not wait for it.
func TestReplayOfOneSetAside(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.putSecond(11, 13)
	r.exec(`ALTER TABLE outbox_messages RENAME payload TO body`)
	eventually(t, "the outbox is set aside", func() bool { return len(x.Status().SetAside) == 1 })
	waits := r.request(table.ReplayChoice{})
	other := r.request(table.ReplayChoice{}, func(q *table.Replay) { q.Outbox = "public.second_outbox" })
	r.wantReplayed(other, "done 3 0")
	if state := r.query1(`SELECT state FROM outbox_replays WHERE replay_id = $1`, waits); state != "requested" {
		t.Errorf("the replay of the outbox that is set aside is %s", state)
	}
	r.exec(`ALTER TABLE outbox_messages RENAME body TO payload`)
	r.wantReplayed(waits, "done 3 0")
}

// TestSlotLostWhileSetAside: the slot or the publication is dropped while the only outbox is set aside.
func TestSlotLostWhileSetAside(t *testing.T) {
	t.Parallel()
	const slot = `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '%[1]s';
		SELECT pg_drop_replication_slot('%[1]s')`
	const publication = `DROP PUBLICATION %[2]s`
	for name, drop := range map[string]string{"slot": slot, "publication": publication, "both": publication + ";" + slot} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.FallbackInterval = 500 * time.Millisecond
			x := r.start().streaming()
			r.put(1, 3)
			r.pending(0)
			r.exec(`ALTER TABLE outbox_messages RENAME attempts TO tries`)
			eventually(t, "the outbox is set aside", func() bool { return len(x.Status().SetAside) == 1 })
			conn := r.conn()
			eventually(t, "it is dropped", func() bool {
				_, err := conn.Exec(t.Context(), fmt.Sprintf(drop, r.cfg.Slot, r.cfg.Publication))
				return err == nil || strings.Contains(err.Error(), "does not exist")
			})
			r.put(4, 6)
			if name == "slot" {
				for range 3 { // a session that works
					r.passes(r.here())
				}
			} else { // a slot would be of no use
				x.alarmed("slot_not_made")
				made := x.metric("walpost_slots_created_total")
				time.Sleep(6 * time.Second) // it tries again after five
				if n := x.metric("walpost_slots_created_total"); n != made {
					t.Errorf("%v slots were made, and then %v", made, n)
				}
			}
			r.exec(`ALTER TABLE outbox_messages RENAME tries TO attempts`)
			r.put(7, 9)
			r.pending(0)
			r.joined(1)
			r.put(10, 12)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 12)
			x.quiet("no_progress")
			x.halt()
		})
	}
}
