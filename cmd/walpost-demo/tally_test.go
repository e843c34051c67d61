package main

import (
	"errors"
	"fmt"
	"iter"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// message is what a test puts into the stream.
type message struct {
	row       int64
	copy      int // another message id of the same row
	aggregate string
	step      int
}

func (m message) payload() string { return fmt.Sprintf(`{"step": %d}`, m.step) }

func (m message) msg() *nats.Msg {
	msg := nats.NewMsg("events.order.paid")
	msg.Header.Set(nats.MsgIdHdr, fmt.Sprintf("7/shop/public.outbox_messages/%d/%016x", m.row, m.copy+1)) // a hash of 0 is no row's
	msg.Header.Set("ce-source", "7/shop")
	msg.Header.Set("ce-subject", m.aggregate)
	msg.Header.Set("ce-type", "order%2Epaid")
	msg.Data = []byte(m.payload())
	return msg
}

func (m message) inTable() row {
	return row{id: m.row, content: content{m.aggregate, "order.paid", m.payload()}}
}

func all(rows []row, err error) iter.Seq2[row, error] {
	return func(yield func(row, error) bool) {
		for _, r := range rows {
			if !yield(r, nil) {
				return
			}
		}
		if err != nil {
			yield(row{}, err)
		}
	}
}

// stream is an empty one, as the relay would have made it.
func stream(t *testing.T) jetstream.JetStream {
	t.Helper()
	nc := testenv.ConnectNATS(t, testenv.NewNATS(t, testenv.NATSOptions{}).URL())
	js := testenv.JetStream(t, nc)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: streamName, Subjects: []string{"events.>"}})
	check(t, err)
	return js
}

func TestTally(t *testing.T) {
	one, two, three := message{row: 1, aggregate: "order/1", step: 1}, message{row: 2, aggregate: "order/1", step: 2}, message{row: 5, aggregate: "order/1", step: 3}
	other := message{row: 4, aggregate: "order/2", step: 1}
	again, altered := two, two
	again.copy, altered.step = 1, 7
	delayed := message{row: 9, aggregate: "order/3"}.inTable()
	delayed.recorded = true
	rows := []row{one.inTable(), two.inTable(), other.inTable(), three.inTable()}
	for name, c := range map[string]struct {
		sent []message
		rows []row
		want verdict
		live counts
	}{
		"whole":      {[]message{one, two, other, three}, rows, verdict{committed: 4, stored: 4, aggregates: 2}, counts{stored: 4}},
		"empty":      {nil, rows, verdict{committed: 4, lost: 4}, counts{}},
		"lost":       {[]message{one, other, three}, rows, verdict{committed: 4, stored: 3, lost: 1, aggregates: 2}, counts{stored: 3, missing: 1}},
		"lost last":  {[]message{one, two, other}, rows, verdict{committed: 4, stored: 3, lost: 1, aggregates: 2}, counts{stored: 3}},
		"duplicated": {[]message{one, two, again, other, three}, rows, verdict{committed: 4, stored: 4, duplicated: 1, aggregates: 2}, counts{stored: 4, duplicated: 1}},
		"reordered":  {[]message{one, three, two, other}, rows, verdict{committed: 4, stored: 4, reordered: 1, aggregates: 2}, counts{stored: 4, reordered: 1}},
		"of two":     {[]message{other, one, two, three}, rows, verdict{committed: 4, stored: 4, aggregates: 2}, counts{stored: 4}},
		"altered":    {[]message{one, altered, other, three}, rows, verdict{committed: 4, stored: 3, lost: 1, unknown: 1, aggregates: 2}, counts{stored: 4, missing: 4}},
		"rolled back": {
			[]message{one, two, other, three},
			rows[:3],
			verdict{committed: 3, stored: 3, unknown: 1, aggregates: 2},
			counts{stored: 4},
		},
		"delayed": {
			[]message{one, two, other, three},
			append(rows[:4:4], delayed),
			verdict{committed: 5, stored: 4, recorded: 1, aggregates: 2},
			counts{stored: 4},
		},
	} {
		t.Run(name, func(t *testing.T) {
			js := stream(t)
			for _, m := range c.sent {
				_, err := js.PublishMsg(t.Context(), m.msg())
				check(t, err)
			}
			tally, err := readStream(t.Context(), js)
			check(t, err)
			v, err := tally.compare(all(c.rows, nil))
			check(t, err)
			if v != c.want || tally.counts() != c.live {
				t.Errorf("verdict %+v, %+v; want %+v, %+v", v, tally.counts(), c.want, c.live)
			}
			sound := v.lost+v.duplicated+v.reordered+v.unknown == 0
			if v.ok() != sound {
				t.Errorf("ok = %t of %+v", v.ok(), v)
			}
		})
	}
}

// A message that names no row is not overlooked.
func TestTallyForeign(t *testing.T) {
	js := stream(t)
	for _, id := range []string{"", "7/shop/public.other/1/0000000000000001", "7/shop/public.outbox_messages/x/0000000000000001"} {
		m := message{row: 1}.msg()
		m.Header.Del(nats.MsgIdHdr)
		if id != "" {
			m.Header.Set(nats.MsgIdHdr, id)
		}
		_, err := js.PublishMsg(t.Context(), m)
		check(t, err)
	}
	tally, err := readStream(t.Context(), js)
	check(t, err)
	v, err := tally.compare(all(nil, nil))
	check(t, err)
	if v.unknown != 3 || v.ok() {
		t.Errorf("verdict %+v, want 3 unknown", v)
	}
}

func TestTallyWithoutTable(t *testing.T) {
	broken := errors.New("broken")
	if _, err := newTally().compare(all(nil, broken)); !errors.Is(err, broken) {
		t.Errorf("error %v, want the table's", err)
	}
}
