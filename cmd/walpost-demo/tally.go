package main

import (
	"encoding/json"
	"fmt"
	"hash/maphash"
	"iter"
	"net/url"
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/outbox"
)

// content is what a consumer gets of a row.
type content struct{ aggregate, eventType, payload string }

// tally counts a stream's messages from its beginning, by what any consumer
// sees of them: headers and body. It knows nothing of the relay.
type tally struct {
	seed maphash.Seed

	mu         sync.Mutex // guards what follows
	messages   int
	rows       map[int64]uint64     // row id -> hash of its content
	aggregates map[string]*progress // "order/17" -> how far it is
	duplicated int                  // messages of a row that had one
	reordered  int                  // messages behind a later one of their aggregate
	unknown    int                  // messages of no row
	missing    int                  // steps that a later one of their order has overtaken
}

// progress of an aggregate. Row ids ascend in commit order, because the writers
// lock the order before they insert.
type progress struct {
	row         int64 // the greatest id so far
	step, steps int   // the greatest step, and how many there were
}

func newTally() *tally {
	return &tally{seed: maphash.MakeSeed(), rows: map[int64]uint64{}, aggregates: map[string]*progress{}}
}

// add counts one message, the next one of the stream.
func (t *tally) add(m jetstream.Msg) {
	id, ok := rowID(m.Headers())
	c := contentOf(m)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.messages++
	if !ok {
		t.unknown++
		return
	}
	if _, again := t.rows[id]; again {
		t.duplicated++
		return
	}
	t.rows[id] = maphash.Comparable(t.seed, c)
	t.advance(id, c)
}

func (t *tally) advance(id int64, c content) {
	p := t.aggregates[c.aggregate]
	if p == nil {
		p = &progress{}
		t.aggregates[c.aggregate] = p
	}
	if id < p.row {
		t.reordered++
	}
	p.row = max(p.row, id)
	var e event
	if json.Unmarshal([]byte(c.payload), &e) != nil || e.Step == 0 {
		return // not of the shop
	}
	t.missing -= p.step - p.steps
	p.step, p.steps = max(p.step, e.Step), p.steps+1
	t.missing += p.step - p.steps
}

// rowID takes the id of the row from the message id.
func rowID(h nats.Header) (int64, bool) {
	id, ok := outbox.ParseMessageID(unescape(h.Get("ce-source")), h.Get(nats.MsgIdHdr))
	if !ok || id.Table != outboxTable {
		return 0, false
	}
	n, err := strconv.ParseInt(id.ID, 10, 64)
	return n, err == nil
}

func contentOf(m jetstream.Msg) content {
	h := m.Headers()
	return content{unescape(h.Get("ce-subject")), unescape(h.Get("ce-type")), string(m.Data())}
}

// unescape undoes the percent-encoding of CloudEvents headers.
func unescape(s string) string {
	if v, err := url.PathUnescape(s); err == nil {
		return v
	}
	return s
}

// counts are a tally's, at one moment.
type counts struct{ stored, missing, duplicated, reordered int }

func (t *tally) counts() counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return counts{len(t.rows), t.missing, t.duplicated, t.reordered}
}

// row is one of the table.
type row struct {
	id int64
	content
	// recorded says that the table tells why it is not delivered: it is delayed,
	// or a failure is written in it.
	recorded bool
}

// verdict is what the comparison of the stream with the table has found.
type verdict struct {
	committed  int // rows of the table
	stored     int // of them, those that are in the stream, as they are
	recorded   int // of them, those that are not, and the table says why
	lost       int // of them, the others
	duplicated int
	reordered  int
	unknown    int // messages that are no row: rolled back, or altered
	aggregates int
	latency    percentiles
}

// compare finds each row of the table in the stream.
func (t *tally) compare(rows iter.Seq2[row, error]) (verdict, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := verdict{duplicated: t.duplicated, reordered: t.reordered, aggregates: len(t.aggregates)}
	for r, err := range rows {
		if err != nil {
			return v, fmt.Errorf("compare the stream with the table: %w", err)
		}
		v.committed++
		hash, found := t.rows[r.id]
		switch {
		case found && hash == maphash.Comparable(t.seed, r.content):
			v.stored++
		case !found && r.recorded:
			v.recorded++
		default:
			v.lost++
		}
	}
	v.unknown = t.unknown + len(t.rows) - v.stored
	return v, nil
}

func (v *verdict) ok() bool {
	return v.lost == 0 && v.duplicated == 0 && v.reordered == 0 && v.unknown == 0
}

// String is the line for programs.
func (v *verdict) String() string {
	return fmt.Sprintf("walpost-demo: committed=%d stored=%d lost=%d duplicated=%d reordered=%d "+
		"p50=%s p99=%s", v.committed, v.stored, v.lost, v.duplicated, v.reordered,
		milliseconds(v.latency.p50), milliseconds(v.latency.p99))
}
