package verify

import (
	"fmt"
	"hash/maphash"
	"runtime"
	"strconv"
	"testing"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func newOrder() *comparison {
	return &comparison{report: newReport(), order: map[uint64]spot{}, seed: maphash.MakeSeed(), numbers: map[history]uint32{}}
}

// TestOrderIsOfOneCluster: LSNs of another cluster behind the same source begin again,
// and those of one go on over its timelines.
func TestOrderIsOfOneCluster(t *testing.T) {
	v := newOrder()
	for i, m := range []struct {
		system   string
		timeline uint32
		commit   outbox.LSN
		n        uint32
		polled   bool
		want     int64      // reordered by then
		late     outbox.LSN // where the WAL has it, beside the position
	}{
		{"7001", 1, 900, 1, false, 0, 0},
		{"7001", 1, 900, 1, true, 0, 0}, // the table's are compared among themselves
		{"7001", 2, 800, 1, false, 0, 0},
		{"7001", 1, 950, 1, false, 1, 0},
		{"7002", 1, 100, 1, false, 1, 0},
		{"7002", 1, 100, 2, false, 1, 0},
		{"7002", 1, 100, 2, true, 1, 0},
		{"7002", 1, 90, 1, false, 2, 0},
		{"7002", 1, 100, 2, true, 3, 99}, // what had to wait is compared with all
		{"7002", 1, 100, 2, true, 3, 101},
		{"7002", 1, 101, 1, false, 4, 0},
		{"7002", 1, 102, 1, false, 4, 0},
		{"7001", 1, 100, 1, false, 4, 0},
	} {
		at := outbox.Position{SystemID: m.system, Timeline: m.timeline, Commit: m.commit, N: m.n}
		row := at
		if row.Commit = m.late; m.late == 0 {
			row = outbox.Position{}
		}
		if !m.polled {
			row = at
		}
		v.follow(jetstream.Message{Seq: uint64(i + 1), Aggregate: aggregate("1"), Polled: m.polled, Position: at, Row: row}, false, false)
		if got := v.report.Found[Reordered].Count; got != m.want {
			t.Errorf("message %d: %d reordered, want %d", i+1, got, m.want)
		}
	}
}

// TestOrderTakesLittle holds what the help says of the memory: up to 90 bytes.
func TestOrderTakesLittle(t *testing.T) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	worst, before := 0.0, heap()
	v := newOrder()
	for i := range testenv.Size(t, 200_000, 1_000_000) {
		at := outbox.Position{SystemID: fmt.Sprint(7000 + i%2), Commit: outbox.LSN(i + 1), N: 1}
		v.follow(jetstream.Message{Seq: uint64(i + 1), Aggregate: aggregate(strconv.Itoa(i)), Position: at, Row: at}, false, false)
		if n := i + 1; n%20_000 == 0 {
			worst = max(worst, float64(heap()-before)/float64(n))
		}
	}
	if worst > 90 {
		t.Errorf("an aggregate takes up to %.0f bytes", worst)
	}
	t.Logf("up to %.0f bytes", worst)
	runtime.KeepAlive(v)
}

func aggregate(id string) outbox.AggregateKey {
	return outbox.AggregateKeyOf(nil, []byte("order"), []byte(id))
}

// TestOrderAfterAPromotion: while the table delivers, the publisher's position is the newest message's. A promotion
// goes back behind those that it has lost, and messages from the table carry such positions, too.
func TestOrderAfterAPromotion(t *testing.T) {
	v := newOrder()
	v.cfg.Phantom = func(p outbox.Position) bool { return p.Timeline == 1 && p.Commit >= 500 }
	for i, m := range []struct {
		timeline uint32
		commit   outbox.LSN
		want     int64
	}{
		{1, 400, 0},
		{1, 600, 0}, // behind a message that the promotion has lost
		{1, 400, 0},
		{2, 550, 0},
		{2, 540, 1},
	} {
		at := outbox.Position{SystemID: "7001", Timeline: m.timeline, Commit: m.commit, N: 1}
		v.follow(jetstream.Message{Seq: uint64(i + 1), Aggregate: aggregate("1"), Polled: true, Position: at}, false, false)
		if got := v.report.Found[Reordered].Count; got != m.want {
			t.Errorf("message %d: %d reordered, want %d", i+1, got, m.want)
		}
	}
}
