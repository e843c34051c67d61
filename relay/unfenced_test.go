package relay_test

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestUnfenced: a standby is promoted while its primary goes on, or comes back, and both take writes. A session that begins then works
// on one server: every row of the promoted one is stored once, and none that the old one got afterwards.
func TestUnfenced(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"outbox_messages", outbox.AppendTable} {
		for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
			for name, play := range map[string]func(*unfenced){
				"goes on": (*unfenced).goesOn, "comes back": (*unfenced).comesBack, "moves": (*unfenced).moves,
			} {
				t.Run(fmt.Sprintf("%s/%s/%s", table, mode, name), func(t *testing.T) {
					testenv.Cluster(t, func(t *testing.T, primary *testenv.Postgres) {
						t.Parallel()
						r := newRig(t, primary)
						if table == outbox.AppendTable {
							r.cfg.Outboxes = []*outbox.Table{{Schema: "public", Name: table, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}}
							r.migrate(r.cfg.Outboxes...)
						}
						r.cfg.Mode, r.cfg.FallbackInterval = mode, 200*time.Millisecond
						play(&unfenced{r, table, r.query1(`SELECT current_database()::text`), primary, primary.NewStandby(t, "sb", nil)})
					})
				})
			}
		}
	}
}

// unfenced is a rig with two servers.
type unfenced struct {
	*rig
	table, db    string
	old, standby *testenv.Postgres
}

// start begins on the old server. The URL has the servers in an order.
func (u *unfenced) start(order ...*testenv.Postgres) *running {
	u.t.Helper()
	return u.startAt(fmt.Sprintf("127.0.0.1:%d,127.0.0.1:%d", order[0].Port(), order[1].Port()))
}

func (u *unfenced) startAt(hosts string) *running {
	u.t.Helper()
	u.cfg.PostgresURL = fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable&target_session_attrs=read-write", hosts, u.db)
	x := u.rig.start()
	u.delivers(x)
	u.put(u.old, 1, 20)
	u.stores(20)
	lsn := u.here()
	if u.cfg.Mode != relay.ModePoll {
		u.passes(lsn)
	}
	eventually(u.t, "the standby has the rows and their marks", func() bool {
		return u.query1(`SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication WHERE application_name = 'sb'`) == "true"
	})
	return x
}

func (u *unfenced) put(server *testenv.Postgres, from, to int) {
	u.t.Helper()
	u.must(u.acts.exec(u.t.Context(), server.URL(u.db), strings.Replace(putSQL, "outbox_messages", u.table, 1), "order.placed", from, to))
}

func (u *unfenced) stores(rows int) {
	u.t.Helper()
	eventually(u.t, fmt.Sprintf("%d rows are stored", rows), func() bool { return int(u.storedCount()) >= rows })
}

func (u *unfenced) delivers(x *running) {
	u.t.Helper()
	eventually(u.t, "the relay delivers", func() bool { return x.Status().State == "streaming" || x.Status().State == "polling" })
}

// reconnect ends the relay's connections to its server, all but the one that has the lock, and those to NATS.
func (u *unfenced) reconnect(x *running, server *testenv.Postgres) {
	u.t.Helper()
	u.must(u.acts.exec(u.t.Context(), server.URL(u.db), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE application_name = 'walpost' AND datname = current_database() AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')`))
	u.must(u.nats.Restart(u.t.Context()))
	u.delivers(x)
}

func (u *unfenced) isOn(x *running, server *testenv.Postgres, timeline uint32) {
	u.t.Helper()
	if on := x.Status().Postgres; on.Address != fmt.Sprintf("127.0.0.1:%d", server.Port()) || on.Timeline != timeline || on.Started.IsZero() {
		u.t.Errorf("the status says %v", on)
	}
	if n := x.metric("walpost_postgres_info", "address", x.Status().Postgres.Address); n != 1 {
		u.t.Errorf("the metric says %v", n)
	}
}

func (u *unfenced) isOnce(want int) {
	u.t.Helper()
	u.stores(want)
	u.url = u.standby.URL(u.db)
	if u.cfg.Mode != relay.ModePoll {
		u.passes(u.here())
	}
	got := u.numbers()
	if !slices.IsSorted(got) {
		u.t.Errorf("not in order: %v", got)
	}
	slices.Sort(got)
	if !slices.Equal(got, span(1, want)) {
		u.t.Errorf("stored %s, want %s", brief(got), brief(span(1, want)))
	}
}

// goesOn: nobody writes to the old server any more, and the relay is there.
func (u *unfenced) goesOn() {
	x := u.start(u.standby, u.old)
	u.isOn(x, u.old, 1)
	u.must(u.standby.Promote(u.t.Context()))
	u.put(u.standby, 21, 120)
	u.reconnect(x, u.old)
	u.put(u.standby, 121, 220)
	time.Sleep(2 * time.Second) // for passes
	u.must(u.old.Stop(u.t.Context(), testenv.Immediate))
	u.isOnce(220)
	u.isOn(x, u.standby, 2)
	x.halt()
}

// comesBack: the old server takes rows that nobody wants.
func (u *unfenced) comesBack() {
	x := u.start(u.old, u.standby)
	u.must(u.old.Stop(u.t.Context(), testenv.Immediate))
	u.must(u.standby.Promote(u.t.Context()))
	u.put(u.standby, 21, 120)
	u.stores(120)
	u.must(u.old.Start(u.t.Context()))
	u.put(u.old, 1001, 1100)
	u.reconnect(x, u.standby)
	u.put(u.standby, 121, 220)
	u.isOnce(220)
	x.halt()
}

// moves: one address leads to the old server, and then to the promoted one, while connections to the old one are open.
func (u *unfenced) moves() {
	var at atomic.Pointer[testenv.Postgres]
	at.Store(u.old)
	x := u.startAt(between(u.t, func() string { return fmt.Sprintf("127.0.0.1:%d", at.Load().Port()) }, func(from *bufio.Reader, to io.Writer) {
		_, _ = io.Copy(to, from)
	}))
	u.must(u.standby.Promote(u.t.Context()))
	u.put(u.standby, 21, 120)
	at.Store(u.standby)
	u.reconnect(x, u.old)
	said := fmt.Sprint(x.alarmed("another_server"))
	if !strings.Contains(said, "timeline 1") || !strings.Contains(said, "timeline 2") {
		u.t.Errorf("the alarm says %s", said)
	}
	u.put(u.standby, 121, 220)
	u.isOnce(220)
	x.halt()
}
