package consume_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
)

// TestDatabaseLosesCommits, as an asynchronous failover does. The queue has not the events any more whose
// effects are gone.
func TestDatabaseLosesCommits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.Partitions = 1
	r.run(cfg, effect)
	r.put(10, 1)
	r.effects(10)
	r.must(pgx.BeginFunc(t.Context(), r.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `UPDATE consumer_offsets SET last_processed_id = 5, anchor_sequence = NULL`)
		if err == nil {
			_, err = tx.Exec(t.Context(), `DELETE FROM effects WHERE event_id::int > 5`)
		}
		if err == nil {
			_, err = tx.Exec(t.Context(), `TRUNCATE consumer_seen`)
		}
		return err
	}))
	r.put(1, 1)
	r.effects(11)
}

// hooked is a connection whose writes a test looks at. lose is answered by the connection's loss.
type hooked struct {
	net.Conn
	write func(conn net.Conn, b []byte) answer
	dead  atomic.Bool
}

type answer int

const (
	pass    answer = iota
	swallow        // as a network that takes what is sent, and brings nothing
	lose
)

func (h *hooked) Read(b []byte) (int, error) {
	if h.dead.Load() {
		return 0, io.EOF
	}
	return h.Conn.Read(b)
}

func (h *hooked) Write(b []byte) (int, error) {
	switch h.write(h.Conn, b) {
	case swallow:
		return len(b), nil
	case lose:
		h.dead.Store(true)
		return len(b), nil
	}
	return h.Conn.Write(b)
}

// atCommit does something at the first COMMIT of a transaction that has sent a text.
func atCommit(text string, do func(conn net.Conn, b []byte) answer) func(context.Context, string, string) (net.Conn, error) {
	var once atomic.Bool
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		found := false
		return &hooked{Conn: conn, write: func(conn net.Conn, b []byte) answer {
			found = found || bytes.Contains(b, []byte(text))
			if found && bytes.Contains(b, []byte("commit")) && once.CompareAndSwap(false, true) {
				return do(conn, b)
			}
			return pass
		}}, nil
	}
}

// sent has the COMMIT arrive, and loses its reply.
func sent(conn net.Conn, b []byte) answer {
	_, _ = conn.Write(b)
	return lose
}

// TestLostReplyOfCommit: the row decides what became of the transaction, whatever that did.
func TestLostReplyOfCommit(t *testing.T) {
	t.Parallel()
	for what, text := range map[string]string{"effect": "INSERT INTO effects", "parking": `"consumer_parked`, "retry": "DELETE FROM"} {
		for how, do := range map[string]func(net.Conn, []byte) answer{
			"committed":   sent,
			"rolled back": func(net.Conn, []byte) answer { return lose },
		} {
			t.Run(what+" "+how, func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				cfg, err := pgxpool.ParseConfig(r.url)
				r.must(err)
				if text == `"consumer_parked` {
					text = "INSERT INTO \"public\".consumer_parked"
				}
				cfg.ConnConfig.DialFunc = atCommit(text, do)
				pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
				r.must(err)
				t.Cleanup(pool.Close)
				r.put(30, 2)
				c := r.config()
				c.Pool, c.Partitions, c.Direct = pool, 1, r.url
				r.run(c, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
					if e.ID == "5" && e.Attempt < 3 {
						return errors.New("no")
					}
					return effect(ctx, tx, e)
				})
				r.effects(30)
				r.waitFor(`SELECT count(*) FROM consumer_parked`, "0")
			})
		}
	}
}

// TestLostCommitOfDatabaseSQL is no attempt.
func TestLostCommitOfDatabaseSQL(t *testing.T) {
	t.Parallel()
	for how, do := range map[string]func(net.Conn, []byte) answer{"committed": sent, "rolled back": func(net.Conn, []byte) answer { return lose }} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c := r.config()
			c.MaxAttempts = 1
			r.runSQL(c, atCommit("INSERT INTO effects", do))
			r.put(4, 2)
			r.effects(4)
			r.is(`SELECT count(*) FROM consumer_parked`, "0")
		})
	}
}

// runSQL is a consumer on database/sql whose connections are dialled so.
func (r *rig) runSQL(c consume.Config, dial func(context.Context, string, string) (net.Conn, error)) *running {
	r.t.Helper()
	cfg, err := pgx.ParseConfig(r.url)
	r.must(err)
	cfg.DialFunc = dial
	db := stdlib.OpenDB(*cfg)
	r.t.Cleanup(func() { _ = db.Close() })
	c.Pool, c.DB, c.Direct, c.Partitions = nil, db, r.url, 1
	return r.start(func(ctx context.Context) error {
		return consume.RunSQL(ctx, c, func(ctx context.Context, tx *sql.Tx, e consume.Event) error {
			_, err := tx.ExecContext(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
			return err
		})
	})
}

// TestCommitHangs: Run returns all the same.
func TestCommitHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	hangs := make(chan bool, 1)
	c := r.config()
	c.Grace, c.Timeout = time.Second, 10*time.Minute
	x := r.runSQL(c, atCommit("INSERT INTO effects", func(net.Conn, []byte) answer {
		hangs <- true
		return swallow
	}))
	r.put(1, 1)
	<-hangs
	x.halt()
}

// TestRewindOfParkedEvents: they are read again, and not kept beside.
func TestRewindOfParkedEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.MaxAttempts = 1_000_000
	var healed atomic.Bool
	r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "5" && !healed.Load() {
			return errors.New("no")
		}
		return effect(ctx, tx, e)
	})
	r.put(12, 4)
	r.effects(10)
	r.exec(`TRUNCATE effects`)
	tables, err := consumers.Open(t.Context(), pg.Config{URL: r.url}, pg.Own{Schema: "public"})
	r.must(err)
	defer tables.Close()
	_, _, err = tables.Rewind(t.Context(), consumers.Rewind{Name: "test", Sequence: 1, Reapply: time.Unix(1, 0)})
	r.must(err)
	r.effects(10)
	healed.Store(true)
	r.effects(12)
}

// TestOddHeaders: anybody may publish what is not UTF-8.
func TestOddHeaders(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.run(r.config(), func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.Attempt == 1 {
			return errors.New("no")
		}
		_, err := tx.Exec(ctx, insertSQL, fmt.Sprint(e.Sequence), "a", e.Attempt, e.Epoch)
		return err
	})
	for i, change := range []nats.Header{
		{"ce-type": {"bad%FF"}},
		{"ce-type": {"bad%00"}},
		{"Nats-Msg-Id": {"bad\xff"}},
		{"Walpost-Position": {"bad\xff"}},
		{"ce-id": {"bad%FF"}, "ce-source": {"%00"}},
		{"ce-aggregateid": {"%FF%00"}},
		{"ce-tenantid": {"\xff"}},
		{"odd": {"\xff"}},
	} {
		m := message(string(rune('a'+i)), "a", "order.placed")
		for name, values := range change {
			m.Header[name] = values
		}
		_, err := r.js.PublishMsg(t.Context(), m)
		r.must(err)
	}
	r.waitFor(`SELECT count(*) FROM effects`, "8")
	r.waitFor(`SELECT min(last_processed_id) FROM consumer_offsets`, "8")
	if n := r.metric("consumer_failures_total"); n != 8 {
		t.Errorf("consumer_failures_total is %v", n)
	}
}

// TestLongStopKeepsTheLocks: an external effect has no other protection.
func TestLongStopKeepsTheLocks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.Metrics, cfg.Partitions, cfg.Grace = nil, 1, testenv.Patience
	entered, leave := make(chan bool, 10), make(chan bool)
	h := func(context.Context, consume.Event) error {
		entered <- true
		<-leave
		return nil
	}
	x := r.start(func(ctx context.Context) error { return consume.RunExternal(ctx, cfg, h) })
	r.put(1, 1)
	<-entered
	y := r.start(func(ctx context.Context) error { return consume.RunExternal(ctx, cfg, h) })
	x.stop()
	select {
	case <-entered:
		t.Error("two processes handle the event")
	case <-time.After(13 * time.Second):
	}
	close(leave)
	x.ends()
	y.halt()
}
