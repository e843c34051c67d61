package drill_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
)

// TestALostMessageIsCounted: one message is deleted when the relay has recovered, and its row says that it is stored.
func TestALostMessageIsCounted(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r, x := underDrill(t, pg)
		s, err := r.js.Stream(t.Context(), "EVENTS")
		r.must(err)
		r.must(s.DeleteMsg(t.Context(), s.CachedInfo().State.LastSeq-10))
		o := r.await(x)
		r.agrees(o)
		if len(o.Events.Examples) != 1 || !strings.HasPrefix(o.Events.Examples[0], "event ") || strings.Contains(o.Events.Examples[0], "/") {
			t.Errorf("examples %q", o.Events.Examples)
		}
		if o.code != 1 || o.OK || o.Lost != 1 || o.Events.Lost != 1 || o.Duplicated+o.Reordered != 0 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}

// TestADuplicateIsCounted: a message is stored once more, as by a relay that publishes twice.
func TestADuplicateIsCounted(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r, x := underDrill(t, pg)
		s, err := r.js.Stream(t.Context(), "EVENTS")
		r.must(err)
		m, err := s.GetMsg(t.Context(), 1)
		r.must(err)
		again := &nats.Msg{Subject: m.Subject, Data: m.Data, Header: m.Header}
		again.Header.Del("Nats-Expected-Last-Sequence")
		ack, err := r.js.PublishMsg(t.Context(), again)
		r.must(err)
		if ack.Duplicate {
			t.Fatal("JetStream remembers the message: the test shows nothing")
		}
		o := r.await(x)
		if o.code != 1 || o.OK || o.Duplicated != 1 || o.Events.Duplicated != 1 || o.Lost+o.Reordered != 0 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
	})
}

// underDrill returns when the slot was dropped and the relay has delivered for a while again.
func underDrill(t *testing.T, pg *testenv.Postgres) (*rig, *running) {
	t.Helper()
	r := newRig(t, pg)
	r.walpost("migrate", "up")
	r.allow()
	r.start()
	x := r.begin("slot-lost", "--json", "--yes", "--for", "20s")
	before := r.query(`SELECT active_pid FROM pg_replication_slots WHERE slot_name = current_database()`)
	for deadline := time.Now().Add(testenv.Patience); ; time.Sleep(50 * time.Millisecond) {
		now := r.query(`SELECT coalesce(max(active_pid), 0) FROM pg_replication_slots WHERE slot_name = current_database()`)
		if now != "0" && now != before {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the relay does not stream again")
		}
	}
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	r.stored(s.CachedInfo().State.Msgs + 100)
	return r, x
}
