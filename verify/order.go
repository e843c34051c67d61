package verify

import (
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// aggregatesMost bounds the aggregates whose order is followed, with those that the
// table delivered counted apart.
const aggregatesMost = 4_000_000

// spot is where the newest message of an aggregate comes from.
type spot struct {
	history uint32 // where it stands among the comparison's
	n       uint32
	commit  outbox.LSN
	seq     uint64
}

// history is what positions are comparable in. Of one cluster, a later timeline goes
// on from an earlier one.
type history struct {
	system   string
	timeline uint32
}

// follow checks the order of an aggregate. overtaken: rows that had to wait may have been
// passed by later ones. again: the message may be a duplicate, which is not out of order.
func (v *comparison) follow(m jetstream.Message, overtaken, again bool) {
	if m.Aggregate == (outbox.AggregateKey{}) || m.Position.SystemID == "" {
		return
	}
	key, at := m.ID.Table+"/"+string(m.Aggregate[:]), m.Row
	polled := at.SystemID == "" || m.Polled && overtaken
	if polled { // compared among itself
		key, at = "polled/"+key, m.Position
		if v.cfg.Phantom != nil && v.cfg.Phantom(at) {
			return // the publisher's position, which a promotion has taken back
		}
	}
	id := maphash.String(v.seed, key)
	last, known := v.order[id]
	if !known && len(v.order) >= aggregatesMost {
		v.note("there are more than %d aggregates: the order of the others was not compared", aggregatesMost)
		return
	}
	now := spot{v.historyOf(at), at.N, at.Commit, m.Seq}
	if known && v.before(now, last, polled) {
		detail := fmt.Sprintf("%s, behind sequence %d at %s/%d", at, last.seq, last.commit, last.n)
		c := Case{Row: row(m), Seq: m.Seq, Detail: detail}
		if again {
			v.late[m.Seq] = c
		} else {
			v.report.add(Reordered, c)
		}
		return
	}
	v.order[id] = now
}

// before compares places of one cluster; another's begin again. The poller's messages
// repeat the publisher's.
func (v *comparison) before(s, other spot, polled bool) bool {
	if s.history != other.history {
		a, b := v.histories[s.history], v.histories[other.history]
		return a.system == b.system && a.timeline < b.timeline
	}
	if s.commit != other.commit {
		return s.commit < other.commit
	}
	return !polled && s.n <= other.n
}

func (v *comparison) historyOf(p outbox.Position) uint32 {
	h := history{p.SystemID, p.Timeline}
	n, known := v.numbers[h]
	if !known {
		h.system = strings.Clone(h.system) // a piece of a whole header
		n = uint32(len(v.histories))
		v.histories, v.numbers[h] = append(v.histories, h), n
	}
	return n
}
