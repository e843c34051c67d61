package publish

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

type countedAcks struct {
	mu   sync.Mutex
	seqs []uint64
	news chan struct{}
}

func (a *countedAcks) Stored(seq uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seqs = append(a.seqs, seq)
	a.news <- struct{}{}
}

// TestReplaysAreReleasedByTheirPubAcks: they stand among the others in the order of the calls, the marker does not
// see them, and they count as no row in flight.
func TestReplaysAreReleasedByTheirPubAcks(t *testing.T) {
	for _, batching := range []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic} {
		t.Run(string(batching), func(t *testing.T) {
			r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), func(c *natsjs.StreamConfig) {
				c.AllowBatchPublish, c.AllowAtomicPublish = batching == jetstream.BatchFast, batching == jetstream.BatchAtomic
			})
			r.cfg.Batching, r.cfg.Chained = batching, true
			var told atomic.Int64
			r.cfg.OnStored = func(all []Stored) {
				for _, s := range all {
					told.Add(int64(s.N))
				}
			}
			l := r.publisher()
			acks := &countedAcks{news: make(chan struct{}, 100)}
			var want []string
			for i := 1; i <= 60; i++ {
				ev := r.event(i, `{}`)
				if i%3 == 0 {
					ev.Commit, ev.N = 0, 0
					r.must(l.SendReplay(t.Context(), ev, 9, acks))
					want = append(want, fmt.Sprint(i, " again"))
					continue
				}
				r.must(l.Send(t.Context(), ev, i))
				l.EndTransaction()
				want = append(want, fmt.Sprint(i))
			}
			l.Unreleased(func(ref outbox.Ref) {
				var n int
				_, _ = fmt.Sscan(ref.ID, &n)
				if n%3 == 0 {
					t.Errorf("row %d, which is published again, counts as in flight", n)
				}
			})
			r.must(l.Flush())
			if tags := r.settleAll(l, 40); len(tags) != 40 {
				t.Errorf("%d rows were stored, want 40", len(tags))
			}
			for range 20 {
				receive(t, acks.news, "the PubAcks of replays")
			}
			if got := r.idsInOrder(); !slices.Equal(got, want) {
				t.Errorf("stored %q\nwant %q", got, want)
			}
			for deadline := time.Now().Add(testenv.Patience); told.Load() < 40 && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			if n := l.Counts(); n.Unreleased != 0 || n.Inflight != 0 || told.Load() != 40 {
				t.Errorf("%+v and %d events at the end", n, told.Load())
			}
			for i, seq := range acks.seqs {
				if seq != uint64(3*i+3) {
					t.Errorf("replay %d was stored at sequence %d", i, seq)
				}
			}
		})
	}
}

// TestEnvelopesOfReplays: the id is the message's own in both formats, and the header names the first one.
func TestEnvelopesOfReplays(t *testing.T) {
	for _, format := range []Format{FormatBinary, FormatCloudEvents} {
		e := newEnvelope(t, format)
		ev := testEvent()
		st := testStamp(ev)
		st.Via, st.Replay = jetstream.ViaReplay, 12
		msg := build(t, e, ev, st)
		if got := msg.Header.Get(jetstream.ReplayOfHeader); got != st.Ref.String() {
			t.Errorf("%s: of %q, want %q", format, got, st.Ref)
		}
		if got := msg.Header.Get("Nats-Msg-Id"); got != st.Ref.MessageID("7300/shop")+"/replay-12" {
			t.Errorf("%s: message id %q", format, got)
		}
		id := msg.Header.Get("ce-id")
		if format == FormatCloudEvents {
			var body struct{ ID string }
			must(0, json.Unmarshal(msg.Data, &body))(t)
			id = body.ID
		}
		if id != st.Ref.String()+"/replay-12" {
			t.Errorf("%s: event id %q", format, id)
		}
		if m, ok := outbox.ParseMessageID("7300/shop", msg.Header.Get("Nats-Msg-Id")); !ok || !m.Replay || m.Request != 12 {
			t.Errorf("%s: read back as %+v", format, m)
		}
	}
}

// idsInOrder are the rows' ids, the oldest message first, each with a word where it is published again.
func (r *publisherRig) idsInOrder() (ids []string) {
	r.t.Helper()
	info, err := r.stream.Info(r.t.Context())
	r.must(err)
	r.must(r.stream.ScanForward(r.t.Context(), 1, info.LastSeq, jetstream.ScanOptions{Source: "src", Step: func(ms []jetstream.Message) (bool, error) {
		for _, m := range ms {
			if ids = append(ids, m.ID.ID); m.ID.Replay {
				ids[len(ids)-1] += " again"
			}
		}
		return true, nil
	}}))
	return ids
}

// TestReplaysAreNoPhantoms: they repeat the publisher's position, which a promotion may have taken back. Their rows are
// of another time.
func TestReplaysAreNoPhantoms(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	l := r.publisher()
	for id := range 10 {
		r.must(r.send(l, id))
	}
	acks := &countedAcks{news: make(chan struct{}, 1)}
	r.must(l.SendReplay(t.Context(), r.event(3, `{}`), 1, acks))
	r.must(l.Flush())
	r.settleAll(l, 10)
	receive(t, acks.news, "the replay's PubAck")
	info, err := r.stream.Info(t.Context())
	r.must(err)
	replays := 0
	found, err := r.stream.ScanBackward(t.Context(), info.FirstSeq, info.LastSeq, jetstream.ScanOptions{
		Source: "src", Phantom: func(p outbox.Position) bool { return p.Commit >= 8 },
		Step: func(ms []jetstream.Message) (bool, error) {
			for _, m := range ms {
				if m.ID.Replay {
					replays++
				}
			}
			return true, nil
		},
	})
	r.must(err)
	if replays != 1 || found.Own != 9 || found.Phantoms != 2 || !found.Beyond || found.Tail.ID.ID != "7" {
		t.Errorf("%d replays, found %+v", replays, found)
	}
}

// TestReplayIsStoredTwice: JetStream has a message of the same replay. The row counts as refused, so that the next
// session does not publish it once more.
func TestReplayIsStoredTwice(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	r.cfg.Chained = false
	l := r.publisher()
	acks := &countedAcks{news: make(chan struct{}, 2)}
	for range 2 {
		r.must(l.SendReplay(t.Context(), r.event(3, `{}`), 1, acks))
	}
	r.must(l.Flush())
	receive(t, l.Failed(), "the publisher's end")
	refused := l.Drain(t.Context())
	if len(refused) != 1 || refused[0].Replay != 1 || refused[0].Failure.Class != outbox.RowDuplicate {
		t.Errorf("refused %+v", refused)
	}
	if ds := l.Take(nil, 10); len(ds) != 0 || len(acks.seqs) != 1 {
		t.Errorf("taken %+v, acknowledged %v", ds, acks.seqs)
	}
}
