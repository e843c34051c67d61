package relay_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// JetStream away for several times wal_sender_timeout, under load: gone, or silent
// with every connection open. The replication connection stays, the server hears
// of it all the time, the memory stays bounded, and afterwards everything arrives
// once and in order.
func TestJetStreamAway(t *testing.T) {
	needsProc(t)
	t.Parallel()
	versions, err := pgbin.All()
	if err != nil {
		t.Fatal(err)
	}
	var outages []*outage
	for i, v := range testenv.Some(t, 1, versions...) {
		pg := testenv.NewPostgres(t, testenv.PGOptions{BinDir: v.Dir})
		outages = append(outages, newOutage(t, pg, "gone"))
		if i == 0 {
			outages = append(outages, newOutage(t, pg, "silent"))
		}
	}
	for _, o := range outages {
		o.begin()
	}
	time.Sleep(time.Duration(testenv.Size(t, 40, 90)) * time.Second)
	for _, o := range outages {
		o.end()
	}
}

type outage struct {
	*rig
	kind  string
	relay *process
	load  *ledger
	stop  func() // the load
	seen  func() sightings
	idle  int // memory before
}

func newOutage(t *testing.T, pg *testenv.Postgres, kind string) *outage {
	t.Helper()
	o := &outage{rig: newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true})), kind: kind}
	o.load = newLedger(o.rig)
	o.relay = o.launch().awaitState("streaming")
	o.idle = o.relay.peak()
	return o
}

func (o *outage) begin() {
	o.t.Helper()
	// Much more than the memory that a relay may have comes together meanwhile.
	o.stop = o.load.start(load{writers: 2, rows: 20, padding: 5000, pause: 40 * time.Millisecond})
	eventually(o.t, "events are stored", func() bool { return o.storedCount() > 0 })
	if o.kind == "silent" {
		o.must(o.nats.Pause())
	} else {
		o.must(o.nats.Kill())
	}
	o.seen = o.watchWalsender()
}

func (o *outage) end() {
	o.t.Helper()
	o.t.Logf("PostgreSQL %s, JetStream %s:", o.pg.Binaries().Version, o.kind)
	o.seen().lively(o.t)
	if o.relay.ready() {
		o.t.Error("the relay calls itself ready while JetStream is away")
	}
	if o.kind == "silent" {
		o.must(o.nats.Resume())
	} else {
		o.must(o.nats.Start(o.t.Context()))
	}
	o.stop()
	begun := time.Now()
	o.load.delivered()
	o.t.Logf("%d events of %d bytes were there %s later; memory %s before, %s at most",
		o.load.committed(), 5000, time.Since(begun).Round(time.Millisecond), mib(o.idle), mib(o.relay.peak()))
	o.relay.bounded()
	o.relay.terminate()
}
