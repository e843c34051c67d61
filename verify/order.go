package verify

import (
	"fmt"
	"hash/maphash"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// aggregatesMost bounds the aggregates whose order is followed.
const aggregatesMost = 4_000_000

// place is where the newest messages of an aggregate come from.
type place struct {
	wal, polled spot
}

type spot struct {
	timeline uint32
	n        uint32
	commit   outbox.LSN
	seq      uint64
}

// follow checks the order of an aggregate.
func (v *comparison) follow(m publish.Message) {
	if m.Aggregate == "" || m.Position.SystemID == "" {
		return
	}
	id := maphash.String(v.seed, m.ID.Table+"/"+m.Aggregate)
	p, known := v.order[id]
	if !known && len(v.order) >= aggregatesMost {
		v.note("there are more than %d aggregates: the order of the others was not compared", aggregatesMost)
		return
	}
	now := spot{m.Position.Timeline, m.Position.N, m.Position.Commit, m.Seq}
	last := &p.wal
	if m.Polled {
		last = &p.polled
	}
	if last.seq > 0 && now.before(*last, m.Polled) {
		v.report.add(Reordered, Case{Row: row(m), Seq: m.Seq, Detail: fmt.Sprintf("%s, behind sequence %d at %s/%d", m.Position, last.seq, last.commit, last.n)})
	} else {
		*last = now
	}
	v.order[id] = p
}

// before compares places on one timeline. The poller's messages repeat the lane's.
func (s spot) before(other spot, polled bool) bool {
	if s.timeline != other.timeline {
		return s.timeline < other.timeline
	}
	if s.commit != other.commit {
		return s.commit < other.commit
	}
	return !polled && s.n <= other.n
}
