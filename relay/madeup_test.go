package relay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// flood publishes messages of the relay's source whose ids no row has.
func (r *rig) flood(source string, messages int) {
	r.t.Helper()
	js, err := natsjs.New(testenv.ConnectNATS(r.t, r.nats.URL()), natsjs.WithPublishAsyncMaxPending(4000))
	r.must(err)
	for i := range messages {
		m := nats.NewMsg("events.order.placed")
		m.Header.Set(nats.MsgIdHdr, outbox.Ref{Table: r.cfg.Outboxes[0], ID: fmt.Sprint(50_000_000 + i), Hash: 7}.MessageID(source))
		_, err := js.PublishMsgAsync(m, natsjs.WithStallWait(testenv.Patience))
		r.must(err)
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(testenv.Patience):
		r.t.Fatal("the messages are not stored")
	}
}

// TestMadeUpIDs: another writer publishes more messages of ids that no row has than a start reads back, and copies of old messages. A start
// reads on: it takes no delivered row for lost.
func TestMadeUpIDs(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.markWith(mark)
			r.cfg.Source = "shop"
			r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			const rows = jetstream.U + 1000
			r.put(1, rows)
			r.pending(0)
			x.halt()
			if mark == outbox.MarkUpdate { // the first row is from long before
				r.exec(`UPDATE outbox_messages SET processed_at = processed_at - interval '1 minute' WHERE id = 1`)
			} else {
				r.exec(`UPDATE outbox_journal SET ids = ids - '{[1,2)}'`)
				r.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
					SELECT outbox, kind, '{[1,2)}', processed_at - interval '1 minute' FROM outbox_journal LIMIT 1`)
			}
			r.flood("shop", 2*jetstream.U+1)
			r.duplicateWindowPasses(200 * time.Millisecond)
			r.copyMessage(r.stored()[0], func(*nats.Msg) {})
			for n := rows + 1; n <= rows+2; n++ {
				if n == rows+2 { // so that what the last session has noted proves nothing
					r.loseMessages(rows + 2*jetstream.U)
				}
				x = r.start().streaming()
				r.put(n, n)
				r.pending(0)
				x.halt()
				if lost := x.logs.FilterMessageSnippet("lost").All(); len(lost) > 0 {
					t.Errorf("the relay says %v", lost)
				}
			}
			if got, want := r.storedCount(), uint64(rows+2*jetstream.U+1+1+2-1); got != want {
				t.Errorf("the stream has %d messages, want %d", got, want)
			}
		})
	}
}

// TestMadeUpIDsHideNoRow: rows are stored and cannot be marked, because they are locked, and another writer publishes more messages behind
// theirs than a start reads back. Then the relay stops.
func TestMadeUpIDsHideNoRow(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.markWith(mark)
			r.cfg.Source, r.cfg.Stream.Shared, r.cfg.Stream.Batching = "shop", true, jetstream.BatchSingle
			r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			r.put(1, 10)
			r.pending(0)
			x.halt()
			r.put(11, 20)
			lock := r.conn()
			r.must(run(t.Context(), lock, `BEGIN; SELECT FROM outbox_messages WHERE id > 10 FOR UPDATE`))
			x = r.start()
			eventually(t, "the rows are stored", func() bool { return r.storedCount() == 20 })
			const others = 2*jetstream.U + 1
			r.flood("shop", others)
			r.put(21, 21)
			eventually(t, "the last row is marked", func() bool { return r.storedCount() == 21+others })
			x.halt()
			r.must(run(t.Context(), lock, `ROLLBACK`))
			x = r.start().streaming()
			r.pending(0)
			x.halt()
			if got, want := r.storedCount(), uint64(21+others); got != want {
				t.Errorf("the stream has %d messages, want %d", got, want)
			}
		})
	}
}
