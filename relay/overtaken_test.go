package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestHeldRowsWaitForWhatWasForgotten: a session has recorded that rows wait behind
// a failed one of their aggregate, and lost its connection before the rows in front
// of that one had their PubAcks. The failed one is a dead letter by now. The next
// session may not begin with those that are recorded.
func TestHeldRowsWaitForWhatWasForgotten(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode = mode
			x := r.start()
			r.put(1, 2)
			r.pending(0)
			x.halt()
			r.put(3, 9)
			r.exec(`UPDATE outbox_messages SET last_error = 'held: an earlier row of its aggregate has failed' WHERE (payload ->> 'n')::int BETWEEN 6 AND 8`)
			r.exec(`DELETE FROM outbox_messages WHERE payload ->> 'n' = '5'`)
			r.start()
			eventually(t, "everything is marked", func() bool {
				return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0"
			})
			r.storedIs(1, 4, 6, 9)
		})
	}
}
