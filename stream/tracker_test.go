package stream

import (
	"math/rand/v2"
	"testing"

	"github.com/walpost/walpost/outbox"
)

// model is the tracker's law, written down as slowly as possible: the confirmed
// LSN is that of the last mark before the first one that is not done.
type model struct {
	start outbox.LSN
	marks []*modelMark
}

type modelMark struct {
	end     outbox.LSN
	pending int
	closed  bool
}

func (m *model) confirmed() outbox.LSN {
	lsn := m.start
	for _, x := range m.marks {
		if !x.closed || x.pending > 0 {
			break
		}
		lsn = max(lsn, x.end)
	}
	return lsn
}

type openRow struct {
	txn  *Txn
	mark *modelMark
}

func TestTrackerConfirmsWhatTheLawAllows(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		tracker, law := NewTracker(100), &model{start: 100}
		lsn := outbox.LSN(100)
		var rows []openRow
		var open *Txn
		var openMark *modelMark
		before := tracker.Confirmed()
		for range 400 {
			switch k := rnd.IntN(10); {
			case k < 3 && open == nil:
				open, openMark = tracker.Begin(), &modelMark{}
				law.marks = append(law.marks, openMark)
			case k < 5 && open != nil:
				open.Add()
				openMark.pending++
				rows = append(rows, openRow{open, openMark})
			case k < 6 && open != nil:
				lsn += outbox.LSN(1 + rnd.IntN(50))
				openMark.end, openMark.closed = lsn, true
				open.Commit(lsn)
				open = nil
			case k < 7 && open == nil:
				lsn += outbox.LSN(rnd.IntN(50))
				law.marks = append(law.marks, &modelMark{end: lsn, closed: true})
				tracker.Idle(lsn)
			case len(rows) > 0:
				i := rnd.IntN(len(rows))
				rows[i].mark.pending--
				rows[i].txn.Settled()
				rows = append(rows[:i], rows[i+1:]...)
			}
			got := tracker.Confirmed()
			if want := law.confirmed(); got != want {
				t.Fatalf("seed %d: confirmed %s, the law says %s", seed, got, want)
			}
			if got < before {
				t.Fatalf("seed %d: confirmed went back from %s to %s", seed, before, got)
			}
			before = got
		}
	}
}

func TestTrackerNeverGoesBelowItsStart(t *testing.T) {
	tracker := NewTracker(500)
	tracker.Idle(300) // the first keepalive may lie below the confirmed LSN
	if got := tracker.Confirmed(); got != 500 {
		t.Errorf("confirmed %s, want 0/1F4", got)
	}
}

// waiting is the number of marks that are not confirmed yet.
func (t *Tracker) waiting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.queue) - t.head
}

// TestTrackerIsBounded: a stalled row must not let keepalives pile up, and the
// queue's memory is used again.
func TestTrackerIsBounded(t *testing.T) {
	tracker := NewTracker(0)
	stuck := tracker.Begin()
	stuck.Add()
	stuck.Commit(1)
	for i := range 100_000 {
		tracker.Idle(outbox.LSN(i + 2))
	}
	if n := tracker.waiting(); n != 1 {
		t.Errorf("%d marks are waiting, want 1", n)
	}
	for i := range 1000 { // transactions that wait for nothing, as of delayed rows
		tracker.Begin().Commit(outbox.LSN(i + 2))
	}
	if n := tracker.waiting(); n != 1 {
		t.Errorf("%d marks are waiting, want 1", n)
	}
	for i := range 100_000 { // transactions whose rows are settled after their commits
		x := tracker.Begin()
		x.Add()
		x.Commit(outbox.LSN(i + 2))
		x.Settled()
	}
	if n := tracker.waiting(); n > 2*sweepLeast {
		t.Errorf("%d marks are waiting, want at most %d", n, 2*sweepLeast)
	}
	open := tracker.Begin() // a mark that waits for its row stays
	open.Add()
	for range 5 * sweepLeast {
		x := tracker.Begin()
		x.Add()
		x.Commit(100_002)
		x.Settled()
	}
	stuck.Settled()
	if got := tracker.Confirmed(); got != 100_001 {
		t.Errorf("confirmed %s, want 0/186A1", got)
	}
	open.Commit(100_001)
	open.Settled()
	if got := tracker.Confirmed(); got != 100_002 {
		t.Errorf("confirmed %s, want 0/186A2", got)
	}
	tracker = NewTracker(100_001)
	if got := tracker.Confirmed(); got != 100_001 {
		t.Errorf("confirmed %s, want 0/186A1", got)
	}
	for i := range 100_000 {
		x := tracker.Begin()
		x.Add()
		x.Commit(outbox.LSN(200_000 + i))
		x.Settled()
	}
	if n := cap(tracker.queue) + cap(tracker.free); n > 64 {
		t.Errorf("the tracker keeps room for %d marks", n)
	}
}

func TestTrackerKeepsACrowdInOrder(t *testing.T) {
	tracker := NewTracker(0)
	var txns []*Txn
	for i := range 5000 {
		x := tracker.Begin()
		x.Add()
		x.Commit(outbox.LSN(i + 1))
		txns = append(txns, x)
	}
	for _, x := range txns[1:] {
		x.Settled()
	}
	if got := tracker.Confirmed(); got != 0 {
		t.Fatalf("confirmed %s past the oldest row", got)
	}
	txns[0].Settled()
	if got := tracker.Confirmed(); got != 5000 {
		t.Errorf("confirmed %s, want 0/1388", got)
	}
}

func TestPhantom(t *testing.T) {
	sys := System{ID: "7", Timeline: 3, History: map[uint32]outbox.LSN{1: 1000, 2: 2000}}
	for _, c := range []struct {
		p                   outbox.Position
		phantom, comparable bool
	}{
		{outbox.Position{SystemID: "7", Timeline: 3, Commit: 9999}, false, true},
		{outbox.Position{SystemID: "7", Timeline: 1, Commit: 999}, false, true},
		{outbox.Position{SystemID: "7", Timeline: 1, Commit: 1000}, true, false},
		{outbox.Position{SystemID: "7", Timeline: 2, Commit: 1500}, false, true},
		{outbox.Position{SystemID: "7", Timeline: 4, Commit: 1}, true, false},
		{outbox.Position{SystemID: "7", Timeline: 0, Commit: 1}, true, false},
		{outbox.Position{SystemID: "8", Timeline: 3, Commit: 1}, false, false},
		{outbox.Position{}, false, false},
	} {
		if got := sys.Phantom(c.p); got != c.phantom {
			t.Errorf("Phantom(%s) = %t", c.p, got)
		}
		if got := sys.Comparable(c.p); got != c.comparable {
			t.Errorf("Comparable(%s) = %t", c.p, got)
		}
	}
}

func TestParseHistory(t *testing.T) {
	h, err := parseHistory([]byte("1\t0/3000148\tno recovery target specified\n\n# a comment\n2\tA/5\tbefore 2026-11-20\n"))
	if err != nil {
		t.Fatal(err)
	}
	if len(h) != 2 || h[1] != 0x3000148 || h[2] != 0xA00000005 {
		t.Errorf("parsed %v", h)
	}
	if _, err := parseHistory([]byte("nonsense\n")); err == nil {
		t.Error("nonsense was parsed")
	}
}

// TestTrackerPin: what is received behind a pin is confirmed when it is released.
func TestTrackerPin(t *testing.T) {
	tr := NewTracker(10)
	release := tr.Pin()
	for lsn := outbox.LSN(20); lsn <= 5000; lsn++ {
		tr.Begin().Commit(lsn)
		tr.Idle(lsn)
	}
	if got := tr.Confirmed(); got != 10 {
		t.Errorf("confirmed %s behind a pin, want 0/A", got)
	}
	release()
	if got := tr.Confirmed(); got != 5000 {
		t.Errorf("confirmed %s when it was released, want the last one", got)
	}
}
