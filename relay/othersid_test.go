package relay_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// TestForgedNote: a stream is restored to a time before the last session's begin, and another writer stores a message under the id, and at
// the sequence, that this session has noted. What the stream has lost is found all the same.
func TestForgedNote(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	x := r.start().streaming()
	r.put(1, 50)
	r.pending(0)
	x.halt()
	restore := r.backup()
	x = r.start().streaming()
	r.put(51, 100)
	r.pending(0)
	x.halt()
	r.start().streaming().halt() // notes where the stream ends
	all := r.stored()
	last := all[len(all)-1]
	restore()
	r.duplicateWindowPasses(200 * time.Millisecond)
	for n := len(r.stored()) + 1; n < int(last.Sequence); n++ {
		_, err := r.js().Publish(t.Context(), "events.junk", []byte(`{"n": 0}`))
		r.must(err)
	}
	r.copyMessage(last, func(m *nats.Msg) { m.Subject, m.Data = "events.junk", []byte(`{"n": 0}`) })
	x = r.start().streaming()
	r.pending(0)
	x.halt()
	got := slices.DeleteFunc(r.numbers(), func(n int) bool { return n == 0 })
	slices.Sort(got)
	if !slices.Equal(got, span(1, 100)) {
		t.Errorf("stored %s, want %s", brief(got), brief(span(1, 100)))
	}
}

// TestTransformWhileRunning: the stream gets a subject transform and loses it again while a session runs. What was stored meanwhile is
// the relay's own.
func TestTransformWhileRunning(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	for i, transform := range []*natsjs.SubjectTransformConfig{{Source: "events.>", Destination: "events.moved.>"}, nil} {
		r.editStream(func(c *natsjs.StreamConfig) { c.SubjectTransform = transform })
		eventually(t, "a session begins that knows of it", func() bool {
			return x.logs.FilterMessage("streaming").Len() == i+2
		})
		r.put(11+i*100, 110+i*100)
		r.pending(0)
	}
	x.halt()
	r.duplicateWindowPasses(200 * time.Millisecond)
	x = r.start().streaming()
	r.pending(0)
	x.quiet("forged_message", "events_lost")
	x.halt()
	if got := r.numbers(); !slices.Equal(got, span(1, 210)) {
		t.Errorf("stored %s, want %s", brief(got), brief(span(1, 210)))
	}
}

// TestForgedReplaySteps: another writer has published many messages under ids of replays and of other tables, behind rows that a crash has
// left unmarked, and nothing is noted. They do not end the reading back.
func TestForgedReplaySteps(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
	x := r.start().streaming()
	r.put(1, 20)
	r.pending(0)
	x.halt()
	source := r.stored()[0].Header.Get("ce-source")
	r.exec(`DROP TABLE outbox_sent CASCADE`)
	r.exec(`UPDATE outbox_messages SET processed_at = NULL`)
	js := r.js()
	for n := range 17_000 {
		m := &nats.Msg{Subject: "events.junk", Data: []byte(`{"n": 0}`), Header: nats.Header{}}
		id := fmt.Sprintf("%s/public.outbox_messages/%d/%016x/replay-1", source, n+1000, n)
		if n%1000 == 0 {
			id = fmt.Sprintf("%s/public.outbox_messages/%d/%016x", source, n+1_000_000, n)
		}
		m.Header.Set(nats.MsgIdHdr, id)
		_, err := js.PublishMsgAsync(m, natsjs.WithStallWait(testenv.Patience))
		r.must(err)
	}
	<-js.PublishAsyncComplete()
	x = r.start().streaming()
	r.pending(0)
	x.halt()
	got := slices.DeleteFunc(r.numbers(), func(n int) bool { return n == 0 })
	if !slices.Equal(got, span(1, 20)) {
		t.Errorf("stored %s, want %s", brief(got), brief(span(1, 20)))
	}
}
