package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestPreparedRows: rows of a prepared transaction come when that is committed, however long it has waited and whatever became of
// the relay and the server meanwhile; those of one that is rolled back do not come. Rows before and behind it do not wait.
func TestPreparedRows(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
			t.Run(string(mark)+"/"+string(mode), func(t *testing.T) {
				t.Parallel()
				pg := testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "10"}})
				r := newRig(t, pg)
				r.markWith(mark)
				r.cfg.Mode, r.cfg.FallbackInterval = mode, 200*time.Millisecond
				r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
				x := r.begin()
				r.put(1, 2)
				for _, name := range []string{"first", "second", "third"} {
					n := map[string]string{"first": "3", "second": "4", "third": "5"}[name]
					r.exec(`BEGIN; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
						VALUES ('order', ` + n + `, 'order.placed', '{"n": ` + n + `}'); PREPARE TRANSACTION '` + name + `'`)
				}
				r.put(6, 7)
				r.pending(0)
				r.storedIs(1, 2, 6, 7)
				r.exec(`COMMIT PREPARED 'first'`)
				r.pending(0)
				if mark == outbox.MarkJournal {
					eventually(t, "the progress moves on beside them", func() bool {
						return r.count(`SELECT count(*) FROM public.outbox_known WHERE `+testenv.Settled+` = (SELECT max(id) FROM public.outbox_messages) AND NOT isempty(`+testenv.Holes+`)`) == 1
					})
				}
				x.halt()
				r.must(pg.Stop(t.Context(), testenv.Immediate))
				r.must(pg.Start(t.Context()))
				r.disconnect()
				r.exec(`ROLLBACK PREPARED 'second'`)
				x = r.begin()
				r.put(8, 8)
				r.exec(`COMMIT PREPARED 'third'`)
				r.put(9, 9)
				eventually(t, "nothing is pending", func() bool {
					return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == 0
				})
				if mark == outbox.MarkJournal {
					eventually(t, "the progress has no holes any more", func() bool {
						return r.count(`SELECT count(*) FROM public.outbox_known WHERE `+testenv.Settled+` = (SELECT max(id) FROM public.outbox_messages) AND isempty(`+testenv.Holes+`)`) == 1
					})
				}
				got := map[int]int{}
				for _, n := range r.numbers() {
					got[n]++
				}
				for _, n := range []int{1, 2, 3, 5, 6, 7, 8, 9} {
					if got[n] != 1 || len(got) != 8 {
						t.Fatalf("stored %v, want each but 4 once", got)
					}
				}
				x.quietBut("missed_rows")
			})
		}
	}
}
