package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestFirstStartIsOnce: with postgres.initial none left in the configuration, rows that were committed while the relay was
// stopped are delivered, whatever was changed meanwhile.
func TestFirstStartIsOnce(t *testing.T) {
	t.Parallel()
	acts := map[string]func(*rig){
		"another slot":      func(r *rig) { r.cfg.Slot += "_b" },
		"the slot is gone":  func(r *rig) { r.dropSlot(r.cfg.Slot) },
		"nothing is left":   forgetDelivered,
		"another source":    func(r *rig) { r.dropSlot(r.cfg.Slot); r.cfg.Source = "another" },
		"the tables polled": func(r *rig) { r.dropSlot(r.cfg.Slot); r.cfg.Mode = relay.ModePoll },
		"a shard": func(r *rig) {
			r.dropSlot(r.cfg.Slot)
			r.cfg.Publication += "_shard"
			o := r.cfg.Outboxes[0]
			o.Shard = outbox.Shard{Index: 1, Of: 2}
			if r.query1(`SELECT count(*) FROM outbox_messages t WHERE `+o.ShardSQL("t")) == "0" { // there is one aggregate
				o.Shard.Index = 2
			}
		},
	}
	for name, act := range acts {
		for _, journal := range testenv.Some(t, 1, false, true) {
			for _, before := range []int{0, 5} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					r := newRig(t, testenv.SharedPostgres(t))
					if journal {
						r.journal()
					}
					r.cfg.Initial = "none"
					x := r.start().streaming()
					if before > 0 {
						r.put(1, before)
						r.pending(0)
					}
					x.halt()
					r.put(before+1, before+20)
					act(r)
					t.Cleanup(func() { r.dropSlot(r.cfg.Slot) })
					r.start()
					r.pending(0)
					if n := r.count(`SELECT (SELECT count(*) FROM outbox_journal WHERE kind = 'skipped') +
						(SELECT count(*) FROM outbox_messages WHERE last_error LIKE 'skipped%')`); n != 0 {
						t.Fatalf("%d rows or ranges of rows were skipped", n)
					}
					eventually(t, "all are stored", func() bool { return r.storedCount() >= 20 })
				})
			}
		}
	}
}

// forgetDelivered removes the slot, and what was delivered from table and stream.
func forgetDelivered(r *rig) {
	r.dropSlot(r.cfg.Slot)
	r.exec(`DELETE FROM outbox_messages WHERE processed_at IS NOT NULL OR EXISTS (SELECT FROM outbox_journal j WHERE j.ids @> id);
		DELETE FROM outbox_journal`)
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(r.t.Context()))
}

// TestFirstStartIsNotGuessed: outbox_sent has lost its row, and the slot is there. With postgres.initial none the relay
// asks; both answers are tried.
func TestFirstStartIsNotGuessed(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{true, false} {
		r := newRig(t, testenv.SharedPostgres(t))
		r.cfg.Initial, r.cfg.Source = "none", "shop"
		r.start().streaming().halt()
		r.exec(`DELETE FROM outbox_sent`)
		r.put(1, 10)
		r.asksAbout("public.outbox_messages")
		r.noteSent(r.cfg.Outboxes[0], keep)
		r.start().streaming()
		r.put(11, 20)
		r.pending(0)
		if keep {
			r.storedIs(1, 20)
		} else {
			r.storedIs(11, 20)
		}
	}
}

// noteSent writes what walpost outbox keep writes, or renew.
func (r *rig) noteSent(o *outbox.Table, keep bool) {
	r.t.Helper()
	db, err := table.Open(r.t.Context(), table.Config{URL: r.url, Slot: r.cfg.Slot})
	r.must(err)
	defer db.Close()
	r.must(db.NoteSent(r.t.Context(), table.Sent{
		Outbox: o.String(), Source: r.cfg.Source, Stream: "EVENTS", Slot: r.cfg.Slot, Initial: "pending",
	}, keep))
}

// asksAbout wants a question about an outbox: the relay ends with it, or sets that outbox aside.
func (r *rig) asksAbout(o string) {
	r.t.Helper()
	x := r.start()
	eventually(r.t, "the relay asks about "+o, func() bool {
		asked := fmt.Sprint(x.Status().SetAside)
		select {
		case <-x.done:
			asked = fmt.Sprint(x.err)
		default:
		}
		return strings.Contains(asked, "nothing tells whether this is the first start of "+o)
	})
	x.halt()
}

// TestRenewed: a relay that has delivered begins once more, and its slot has the rows that are marked then. They are not
// published.
func TestRenewed(t *testing.T) {
	t.Parallel()
	for i, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal, outbox.MarkUpdate} {
		polls := i == 2
		t.Run(fmt.Sprint(mark, ", polling ", polls), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.markWith(mark)
			r.cfg.Initial, r.cfg.Source = "none", "shop"
			x := r.start().streaming()
			r.put(1, 5)
			r.pending(0)
			x.halt()
			r.put(11, 20)
			r.noteSent(r.cfg.Outboxes[0], false)
			if polls {
				r.cfg.Mode = relay.ModePoll
				x = r.start()
				eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
				x.halt()
				r.cfg.Mode = relay.ModeAuto
			}
			x = r.start()
			eventually(t, "the pending rows are marked", func() bool { return r.unmarked() == 0 })
			x.streaming()
			r.put(21, 25)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 5, 21, 25)
		})
	}
}

// TestEachOutboxAsks: what is remembered of one outbox says nothing of another, which may have had another name.
func TestEachOutboxAsks(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.addSecond()
	r.cfg.Initial, r.cfg.Source = "none", "shop"
	r.start().streaming().halt()
	r.exec(`DELETE FROM outbox_sent`)
	r.put(1, 5)
	r.asksAbout("public.outbox_messages")
	r.noteSent(r.cfg.Outboxes[0], true)
	r.asksAbout("public.second_outbox")
	r.noteSent(r.cfg.Outboxes[1], true)
	x := r.start().streaming()
	r.pending(0)
	r.storedIs(1, 5)
	x.halt()
	r.exec(`DELETE FROM outbox_messages WHERE processed_at IS NOT NULL`)
	r.put(6, 10)
	r.exec(`ALTER TABLE outbox_messages RENAME TO renamed; DELETE FROM outbox_known`)
	renamed := *r.cfg.Outboxes[0]
	renamed.Name = "renamed"
	r.cfg.Outboxes = []*outbox.Table{&renamed, r.cfg.Outboxes[1]}
	r.asksAbout("public.renamed")
	r.dropSlot(r.cfg.Slot)
	r.asksAbout("public.renamed")
}

// TestKeptDuringItsStart: an operator says that the outbox was delivered before, while its first start waits for a row's
// lock. No row is marked.
func TestKeptDuringItsStart(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Initial, r.cfg.Source = "none", "shop"
	r.put(1, 10)
	ctx, lock := t.Context(), r.conn()
	r.must(run(ctx, lock, `BEGIN; SELECT FROM outbox_messages ORDER BY id LIMIT 1 FOR UPDATE`))
	r.start()
	eventually(t, "the start waits", func() bool {
		return r.query1(`SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == "1"
	})
	r.noteSent(r.cfg.Outboxes[0], true)
	r.must(run(ctx, lock, `ROLLBACK`))
	r.pending(0)
	r.storedIs(1, 10)
}

// TestFirstStartWarnsOnce: of a published table whose rows it would drop, also in a schema that the role may not use, and
// of the stream that it creates.
func TestFirstStartWarnsOnce(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := newRig(t, pg)
	r.exec(`CREATE ROLE relay LOGIN REPLICATION; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO relay; GRANT SELECT, INSERT ON outbox_messages_dlq TO relay;
		GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_journal, outbox_deferred, outbox_known, outbox_sent TO relay; GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO relay;
		CREATE SCHEMA closed; CREATE TABLE closed.events (id bigint); CREATE PUBLICATION walpost FOR TABLE outbox_messages, closed.events WITH (publish = 'insert')`)
	r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay@", 1)
	x := r.start().streaming()
	for _, code := range []string{"publication-other-tables", "stream-one-replica"} {
		if said := x.logs.FilterField(zap.String("code", code)).All(); len(said) != 1 {
			t.Errorf("%s is logged %d times: %v", code, len(said), said)
		} else if code == "publication-other-tables" && !strings.Contains(said[0].Message, "(closed.events)") {
			t.Errorf("the log does not name the table: %s", said[0].Message)
		}
	}
}
