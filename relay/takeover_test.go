package relay_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestTheTailIsReadLast: as long as another walsender has the slot, another
// relay may store events. A relay that takes the slot over must look at the
// stream's tail after that, or it stores them again.
func TestTheTailIsReadLast(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Stream.Shared = true // nothing but the tail tells
	r.cfg.Stream.Batching = jetstream.BatchAuto
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = window })
	x := r.start().streaming()
	r.keep()
	r.put(1, 5)
	r.put(6, 10)
	r.pending(0)
	x.halt()
	r.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE (payload ->> 'n')::int > 5`)
	r.rewind()
	later := r.stored()[5:]
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	for _, m := range later {
		r.must(s.DeleteMsg(t.Context(), m.Sequence))
	}
	r.duplicateWindowPasses(2 * window)

	leave := r.stream()
	server := fmt.Sprintf("127.0.0.1:%d", r.pg.Port())
	proxy := testenv.NewProxy(t, server)
	r.cfg.PostgresURL = strings.Replace(r.url, server, proxy.Addr(), 1)
	x = r.start()
	eventually(t, "the relay stands by", func() bool { return x.Status().State == "standby" })
	proxy.Pause()
	time.Sleep(time.Second) // for a relay that looks at the stream too early
	for _, m := range later {
		_, err := r.js().PublishMsg(t.Context(), &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data})
		r.must(err)
	}
	r.duplicateWindowPasses(2 * window)
	leave()
	proxy.Resume()
	x.streaming()
	r.put(11, 12)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 12)
}

// stream occupies the relay's slot.
func (r *rig) stream() (leave func()) {
	r.t.Helper()
	c, err := pgconn.Connect(r.t.Context(), r.url+"&replication=database")
	r.must(err)
	r.must(pglogrepl.StartReplication(r.t.Context(), c, r.cfg.Slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names 'walpost'"},
	}))
	leave = func() { _ = c.Close(context.Background()) }
	r.t.Cleanup(leave)
	return leave
}

// TestTheLocksHolderMarks: one session has the lock that makes the relay the
// active one, under the name that every relay of the slot goes by, and marks:
// both end together.
func TestTheLocksHolderMarks(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`CREATE TABLE markers (pid int);
		CREATE FUNCTION note_marker() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO markers VALUES (pg_backend_pid()); RETURN NULL; END $$;
		CREATE TRIGGER note_marker AFTER UPDATE ON outbox_messages FOR EACH STATEMENT EXECUTE FUNCTION note_marker()`)
	r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	markers := r.query1(`SELECT string_agg(DISTINCT pid::text, ' ') FROM markers`)
	holder := r.query1(`SELECT coalesce(string_agg(pid::text, ' '), 'nobody') FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND classid::bigint << 32 | objid::bigint = hashtextextended('walpost/' || $1, 0)`, r.cfg.Slot)
	if markers != holder {
		t.Errorf("rows are marked by session %s, the lock is held by %s", markers, holder)
	}
}
