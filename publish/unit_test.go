package publish

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestUnitStates holds the table in unit's comment.
func TestUnitStates(t *testing.T) {
	grow := func(goesOn bool) func(*unit) error {
		return func(u *unit) error { return u.grow(7, 2, goesOn) }
	}
	reply := func(u *unit) error { u.replied(); return nil }
	written := func(u *unit) error { u.written(); return nil }
	cut := func(u *unit) error { u.cut(); return nil }
	for _, c := range []struct {
		from  unitState
		event string
		do    func(*unit) error
		to    unitState
		bad   bool
	}{
		{unitNone, "grow", grow(true), unitOpen, false},
		{unitNone, "close", grow(false), unitClosing, false},
		{unitNone, "written", written, unitNone, false},
		{unitOpen, "grow", grow(true), unitOpen, false},
		{unitOpen, "close", grow(false), unitClosing, false},
		{unitOpen, "written", written, unitOpen, false},
		{unitOpen, "reply", reply, unitFailed, false},
		{unitClosing, "written", written, unitComplete, false},
		{unitClosing, "reply", reply, unitNone, false},
		{unitComplete, "grow", grow(true), unitOpen, false},
		{unitComplete, "close", grow(false), unitClosing, false},
		{unitComplete, "written", written, unitComplete, false},
		{unitComplete, "reply", reply, unitNone, false},
		{unitNone, "cut", cut, unitFailed, false},
		{unitOpen, "cut", cut, unitCut, false},
		{unitClosing, "cut", cut, unitCut, false},
		{unitFailed, "cut", cut, unitFailed, false},
		{unitCut, "grow", grow(true), unitCut, true},
		{unitCut, "close", grow(false), unitCut, true},
		{unitCut, "written", written, unitCut, false},
		{unitCut, "reply", reply, unitFailed, false},
		{unitFailed, "grow", grow(true), unitFailed, true},
		{unitFailed, "close", grow(false), unitFailed, true},
		{unitFailed, "written", written, unitFailed, false},
	} {
		u := unit{first: 1, n: 3, batch: true, state: c.from}
		if err := c.do(&u); u.state != c.to || (err != nil) != c.bad {
			t.Errorf("%s in state %d leads to state %d, %v; want %d", c.event, c.from, u.state, err, c.to)
		}
		if begun := c.from == unitNone || c.from == unitComplete; c.event == "grow" || c.event == "close" {
			want := unit{first: 1, n: 5, batch: true, state: u.state}
			if begun {
				want.first, want.n = 7, 2
			} else if c.bad {
				want.n = 3
			}
			if u != want {
				t.Errorf("%s in state %d leaves %+v, want %+v", c.event, c.from, u, want)
			}
		}
	}
}

// unitModel says what is under way as two lists would: the announced messages, and up to where all is
// written.
type unitModel struct {
	first, written, replied uint64
	open                    int // so many were written of a unit that goes on
	waiting                 []uint64
	cut                     string // what has cut it, if anything
}

// announce is one chunk's beginning; the chunk's end is told by wrote.
func (m *unitModel) announce(first uint64, n int, goesOn bool) bool {
	if m.cut != "" {
		return false
	}
	if m.open == 0 {
		m.first = first
		if goesOn || n > 1 {
			m.waiting = nil
			for i := range n {
				m.waiting = append(m.waiting, first+uint64(i))
			}
		}
		return true
	}
	if m.waiting == nil {
		return false
	}
	for i := range n {
		m.waiting = append(m.waiting, first+uint64(i))
	}
	return true
}

func (m *unitModel) wrote(n int, goesOn bool) {
	if m.open += n; !goesOn {
		m.written, m.open = m.first+uint64(m.open), 0
	}
}

// TestUnitAgreesWithAModel over random chunks, with replies at any moment.
func TestUnitAgreesWithAModel(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	failed := map[string]int{}
	replies := &ring{} // it is large
	for trial := range 3000 {
		var m unitModel
		l := &Publisher{ring: replies}
		u := &l.unit
		next, log := uint64(0), ""
		agree := func() bool {
			l.ring.low = m.replied
			for i := range next + 2 {
				in := len(m.waiting) > 0 && i >= m.waiting[0] && i <= m.waiting[len(m.waiting)-1]
				if u.holds(i) != in || u.begins(i) != (in && i == m.waiting[0]) {
					return false
				}
			}
			return l.underWay() == (m.replied < m.written)
		}
		check := func(what string) {
			if log += what + " "; !agree() {
				t.Fatalf("seed %d, trial %d: %s\nunit %+v\nmodel %+v", seed, trial, log, *u, m)
			}
		}
		// A reply is for all of a batch, or for the one message.
		reply := func() {
			switch {
			case m.waiting != nil:
				m.replied, m.waiting = m.waiting[len(m.waiting)-1]+1, nil
				u.replied()
			case u.state == unitClosing || u.state == unitComplete:
				m.replied = next
			}
			check("reply")
		}
		for range 30 {
			if rng.IntN(3) == 0 {
				reply()
			}
			if l.underWay() {
				continue
			}
			n, goesOn := 1+rng.IntN(4), rng.IntN(3) == 0
			ok := m.announce(next, n, goesOn)
			if err := u.grow(next, n, goesOn); (err == nil) != ok {
				t.Fatalf("seed %d, trial %d: %s: a chunk of %d: %v", seed, trial, log, n, err)
			}
			if !ok {
				failed[m.cut]++
				break
			}
			next += uint64(n)
			check(fmt.Sprintf("chunk(%d,%t)", n, goesOn))
			if rng.IntN(4) == 0 {
				reply()
			}
			if rng.IntN(20) == 0 {
				m.cut = "a failed write"
				u.cut()
				check("cut")
				continue
			}
			m.wrote(n, goesOn)
			if !goesOn {
				u.written()
			}
			check("written")
		}
	}
	if len(failed) != 2 {
		t.Errorf("chunks that may not be written came so often: %v; want behind a reply and behind a failed write", failed)
	}
}

// TestStageKeepsMessages: whatever is added and dropped, each message keeps its bytes and
// its place, and what goes together is what may.
func TestStageKeepsMessages(t *testing.T) {
	type message struct {
		header, body []byte
		index        uint64
		commit       outbox.LSN
		alone        bool
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	random := func(most int) []byte { return bytes.Repeat([]byte{byte(rng.IntN(256))}, rng.IntN(most)) }
	for _, kind := range []jetstream.Batching{jetstream.BatchFast, jetstream.BatchAtomic} {
		for range testenv.Size(t, 15, 50) {
			g := stage{kind: kind, window: 4096, windowBytes: 8 << 20, oneByOne: rng.IntN(2) * rng.IntN(20)}
			var want []message
			whole, next, commit := 0, uint64(rng.IntN(1000)), outbox.LSN(1)
			for range 400 {
				switch {
				case rng.IntN(4) > 0:
					m := message{random(50), random(3000), next, commit, rng.IntN(30) == 0}
					if rng.IntN(10) == 0 {
						m.commit = 0
					}
					g.add(fmt.Sprint(next), next, m.commit, m.header, m.body, m.alone)
					want, next = append(want, m), next+1
				case rng.IntN(2) == 0:
					commit++
					g.whole, whole = len(g.messages), len(want)
				default:
					more := rng.IntN(2) == 0
					ready := g.ready(more, len(want)+rng.IntN(2))
					if ready == 0 {
						continue
					}
					if ready > len(want) || kind == jetstream.BatchAtomic && whole > 0 && ready != whole {
						t.Fatalf("%d of %d messages are ready, of whole transactions %d", ready, len(want), whole)
					}
					n, goesOn := g.next(ready, kind == jetstream.BatchFast && more && ready > 1)
					if n < 1 || n > ready || goesOn && n == ready || g.oneByOne > 0 && (n > 1 || goesOn) {
						t.Fatalf("%d of %d go, and it goes on: %t", n, ready, goesOn)
					}
					for i := range n {
						if want[i].alone && (n > 1 || goesOn) {
							t.Fatal("a message that has to go alone is in a batch")
						}
					}
					before := g.oneByOne
					g.drop(n)
					want, whole = want[n:], max(0, whole-n)
					if g.oneByOne != max(0, before-n) {
						t.Fatalf("%d go one by one behind %d of %d", g.oneByOne, n, before)
					}
				}
				if g.whole != whole || len(g.messages) != len(want) || len(want) > 0 && g.first != want[0].index {
					t.Fatalf("%d messages from %d on, whole %d; want %d", len(g.messages), g.first, g.whole, len(want))
				}
				start := 0
				for i, m := range want {
					s := g.messages[i]
					header, body := g.arena[start:s.header], g.arena[s.header:s.body]
					if !bytes.Equal(header, m.header) || !bytes.Equal(body, m.body) || s.subject != fmt.Sprint(m.index) || s.alone != m.alone {
						t.Fatalf("message %d is another one", m.index)
					}
					start = s.body
				}
			}
		}
	}
}
