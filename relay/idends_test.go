package relay_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestEndsOfIDs: the least and the greatest ids of a type, 0, and ids far from each other are delivered once, read from the
// WAL and from the table, recorded as failures, and made pending again.
func TestEndsOfIDs(t *testing.T) {
	t.Parallel()
	types := map[string][]string{
		"smallint": {"-32768", "-1", "0", "1", "32767"},
		"integer":  {"-2147483648", "-1", "0", "1", "2147483647"},
		"bigint":   {"-9223372036854775808", "-3000000000", "-1", "0", "1", "3000000000", "6000000000", "9223372036854775806", "9223372036854775807"},
	}
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		for _, typ := range []string{"smallint", "integer", "bigint"} {
			if mark == outbox.MarkJournal && typ != "bigint" {
				continue // refused
			}
			for _, mode := range testenv.Some(t, 1, relay.ModeAuto, relay.ModePoll) {
				t.Run(fmt.Sprintf("%s %s %s", mark, typ, mode), func(t *testing.T) {
					t.Parallel()
					r := newRig(t, testenv.SharedPostgres(t))
					r.cfg.Mode, r.cfg.FallbackInterval = mode, 200*time.Millisecond
					r.cfg.Retry = table.Retry{Backoff: 50 * time.Millisecond, MaxAttempts: 1}
					if typ != "bigint" {
						r.exec(`ALTER TABLE outbox_messages ALTER id TYPE ` + typ)
					}
					r.markWith(mark)
					r.query1(`SELECT setval(pg_get_serial_sequence('public.outbox_messages', 'id'), 1)::text`) // else the next id would be 1
					ids := types[typ]
					insert := func(eventType string) {
						t.Helper()
						for i, id := range ids {
							r.exec(`INSERT INTO public.outbox_messages (id, aggregate_type, aggregate_id, event_type, payload)
								OVERRIDING SYSTEM VALUE VALUES (` + id + `, 'order', ` + fmt.Sprint(i) + `, '` + eventType + `', '{}')`)
						}
					}
					stored := func() (ids []string) {
						source := r.query1(`SELECT system_identifier::text || '/' || current_database() FROM pg_control_system()`)
						for _, m := range r.stored() {
							id, _ := outbox.ParseMessageID(source, m.Header.Get("Nats-Msg-Id"))
							ids = append(ids, id.ID)
						}
						return ids
					}
					once := func(when string) {
						t.Helper()
						got, want := stored(), slices.Clone(types[typ])
						slices.Sort(got)
						if slices.Sort(want); !slices.Equal(got, want) {
							t.Errorf("%s: stored %v, want %v", when, got, want)
						}
					}
					all := ids
					x := r.startAtWork()
					ids = all[len(all)/2:]
					insert("order.placed")
					r.pending(0)
					x.halt()
					restore := r.backup()
					ids = all[:len(all)/2]
					insert("order.placed")
					x = r.startAtWork()
					r.pending(0)
					once("at first")
					x.halt()
					if mark != outbox.MarkDelete { // what such a stream loses is gone
						restore()
						x = r.startAtWork()
						eventually(t, "what the stream has lost is stored", func() bool { return len(stored()) == len(all) })
						r.pending(0)
						x.halt()
						once("after a loss")
					}
					r.exec(`DELETE FROM public.outbox_messages`)
					r.exec(`DELETE FROM public.outbox_journal`)
					ids = all
					insert("order cursed")
					x = r.startAtWork()
					eventually(t, "the rows are dead letters", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == len(all) })
					r.pending(0)
					x.halt()
					once("after dead letters")
				})
			}
		}
	}
}
