package relay_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// waitsFor waits until the relay says over HTTP that it waits, and why.
func (p *process) waitsFor(why string) {
	p.t.Helper()
	eventually(p.t, "the start waits: "+why, func() bool {
		if p.ended() {
			p.t.Fatalf("the start has ended:\n%s", p.logTail())
		}
		code, body := p.get("/readyz")
		return code == http.StatusServiceUnavailable && strings.Contains(string(body), why)
	})
	if code, _ := p.get("/healthz"); code != http.StatusOK {
		p.t.Errorf("/healthz answers %d: a restart would not help", code)
	}
}

// TestStartWaitsForServers: servers that are away when the relay starts are waited for, in any
// order, and SIGTERM ends the waiting.
func TestStartWaitsForServers(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.put(1, 5)
		r.must(pg.Stop(t.Context(), testenv.Immediate))
		r.must(r.nats.Kill())
		waiting := r.launch()
		waiting.waitsFor("connect to PostgreSQL")
		waiting.terminate()

		x := r.launch()
		x.waitsFor("connect to PostgreSQL")
		r.must(pg.Start(t.Context()))
		x.waitsFor("connect to NATS")
		r.must(r.nats.Start(t.Context()))
		x.awaitState("streaming")
		r.pending(0)
		r.storedIs(1, 5)
		x.terminate()

		leave := r.full()
		x = r.launch()
		x.waitsFor("53300")
		leave()
		x.awaitState("streaming")
		x.terminate()
	})
}

// full lets a role, as which the relay connects from then on, have no connection until leave.
func (r *rig) full() (leave func()) {
	r.t.Helper()
	role := "full_" + r.query1("SELECT current_database()::text")
	r.exec(`CREATE ROLE ` + role + ` LOGIN REPLICATION CONNECTION LIMIT 0; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO ` + role +
		`; GRANT SELECT, INSERT ON outbox_messages_dlq TO ` + role + `; GRANT SELECT, INSERT, UPDATE ON outbox_known, outbox_sent TO ` + role)
	r.url = strings.Replace(r.url, "postgres@", role+"@", 1)
	return func() {
		r.must(r.pg.Exec(r.t.Context(), "postgres", `ALTER ROLE `+role+` CONNECTION LIMIT -1`))
	}
}

// TestStartEndsForWhatMustBePutRight: waiting would not help.
func TestStartEndsForWhatMustBePutRight(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	for what, env := range map[string]string{
		"database": "WALPOST_POSTGRES_URL=" + strings.Replace(r.url, r.query1("SELECT current_database()::text"), "nowhere", 1),
		"role":     "WALPOST_POSTGRES_URL=" + strings.Replace(r.url, "postgres@", "nobody_knows@", 1),
		"table":    "WALPOST_TABLE=nowhere",
		"TLS":      "WALPOST_NATS_URL=" + strings.Replace(r.nats.URL(), "nats:", "tls:", 1),
	} {
		p := r.launch(env)
		eventually(t, "the start ends: "+what, p.ended)
		if p.prog.Err() == nil {
			t.Errorf("%s: the start ended with success", what)
		}
	}
}

// TestStartWaitsForJetStream: without a quorum there is no stream yet.
func TestStartWaitsForJetStream(t *testing.T) {
	t.Parallel()
	nodes := testenv.NewNATSCluster(t, 3).Nodes
	r := newRigWith(t, testenv.SharedPostgres(t), nodes[0])
	r.put(1, 5)
	r.must(nodes[1].Stop(t.Context()))
	r.must(nodes[2].Stop(t.Context()))
	x := r.start()
	eventually(t, "the start waits", func() bool {
		select {
		case <-x.done:
			t.Fatalf("the start has ended with %v", x.err)
		default:
		}
		return x.logged("start waits for a server, and tries again").Len() > 0
	})
	r.must(nodes[1].Start(t.Context()))
	r.must(nodes[2].Start(t.Context()))
	x.streaming()
	r.pending(0)
	r.storedIs(1, 5)
}
