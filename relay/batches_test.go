package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestBatchesComeBack: while others have as many batches open as the server allows, messages
// go one by one, and afterwards in batches again, although nothing else ends the session.
func TestBatchesComeBack(t *testing.T) {
	t.Parallel()
	for _, kind := range []jetstream.Batching{jetstream.BatchFast, jetstream.BatchAtomic} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			server := testenv.NewNATS(t, testenv.NATSOptions{Process: true, JetStream: `limits: { batch: { max_inflight_total: 1, timeout: "1h" } }`})
			r := newRigWith(t, testenv.SharedPostgres(t), server)
			r.cfg.Stream.Batching = kind
			x := r.start().streaming()
			end := r.openBatch(kind)
			r.put(1, 100)
			r.pending(0)
			if n := r.batched(); n != 0 {
				t.Fatalf("%d messages went in batches, of which the server allows none", n)
			}
			end()
			next := 101
			eventually(t, "messages go in batches again", func() bool {
				r.put(next, next+99)
				next += 100
				r.pending(0)
				time.Sleep(time.Second) // few rows are enough
				return r.batched() > 0
			})
			r.storedIs(1, next-1)
			x.halt()
			r.must(x.err)
		})
	}
}

// openBatch opens a batch in another stream, and returns what ends it.
func (r *rig) openBatch(kind jetstream.Batching) (end func()) {
	r.t.Helper()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	js := testenv.JetStream(r.t, nc)
	_, err := js.CreateStream(r.t.Context(), natsjs.StreamConfig{Name: "OTHER", Subjects: []string{"other"}, AllowBatchPublish: true, AllowAtomicPublish: true})
	r.must(err)
	inbox := nc.NewInbox()
	replies, err := nc.SubscribeSync(inbox + ".>")
	r.must(err)
	send := func(number, operation string) {
		r.t.Helper()
		m := &nats.Msg{Subject: "other", Header: nats.Header{}, Reply: inbox + ".batch.1.fail." + number + "." + operation + ".$FI"}
		if kind == jetstream.BatchAtomic {
			m.Reply = inbox + "." + number
			m.Header.Set("Nats-Batch-Id", "batch")
			m.Header.Set("Nats-Batch-Sequence", number)
			if operation == "2" {
				m.Header.Set("Nats-Batch-Commit", "1")
			}
		}
		r.must(nc.PublishMsg(m))
		reply, err := replies.NextMsg(testenv.Patience)
		r.must(err)
		r.t.Logf("message %s of the other batch: %s", number, reply.Data)
	}
	send("1", "0")
	return func() { send("2", "2") }
}

// batched counts the stored messages that went in batches: of a fast one only the first
// message names the stream.
func (r *rig) batched() (n int) {
	r.t.Helper()
	for _, m := range r.stored() {
		if m.Header.Get("Nats-Batch-Id") != "" || m.Header.Get(nats.ExpectedStreamHdr) == "" {
			n++
		}
	}
	return n
}
