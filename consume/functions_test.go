package consume_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/outbox"
)

// TestPartitionInSQL is the one of Go, for any text.
func TestPartitionInSQL(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	texts := []string{"", "1", "order", "4711", "ä/:é", "a/b", "\U0001f600", "x y", "0", "\u0000"[:0], "\x7f", fmt.Sprint(rand.Uint64())}
	for range 2000 {
		pick := func() string { return texts[rand.IntN(len(texts))] + texts[rand.IntN(len(texts))] }
		tenant, kind, id, event, n := pick(), pick(), pick(), pick(), 1+rand.IntN(256)
		want := fmt.Sprint(outbox.PartitionHash(tenant, kind, id, event) % uint32(n))
		if got := r.text(`SELECT walpost_partition($1, $2, $3, $4, $5)`, tenant, kind, id, event, n); got != want {
			t.Fatalf("partition of %q %q %q %q in %d is %s, want %s", tenant, kind, id, event, n, got, want)
		}
	}
	r.is(`SELECT walpost_partition(NULL, NULL, NULL, 'x', 100)`, fmt.Sprint(outbox.PartitionHash("", "", "", "x")%100))
}

// TestFunctionsAndGo take turns with one consumer.
func TestFunctionsAndGo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	conn, err := pgx.Connect(t.Context(), r.url)
	r.must(err)
	defer conn.Close(t.Context()) //nolint:errcheck // the test ends
	_, err = conn.Exec(t.Context(), `SELECT walpost_define('test', 'EVENTS', 1, 0)`)
	r.must(err)
	take := func() (epoch, sequence int64) {
		t.Helper()
		for { // the consumer's lock is held until its server process has ended
			err := conn.QueryRow(t.Context(), `SELECT epoch, sequence FROM walpost_take('test', 0, 1)`).Scan(&epoch, &sequence)
			if !errors.Is(err, pgx.ErrNoRows) {
				r.must(err)
				return epoch, sequence
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	epoch, _ := take()
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	r.put(5, 3)
	time.Sleep(300 * time.Millisecond)
	r.store("3", "a0", "order.placed") // again, as message 6
	r.put(14, 3)
	stream, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	handle := func(sequence uint64) (answer string) {
		t.Helper()
		m, err := stream.GetMsg(t.Context(), sequence)
		r.must(err)
		id := m.Header.Get("ce-id")
		r.must(pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			var settled *int64
			if err := tx.QueryRow(t.Context(), `SELECT walpost_claim('test', 0, $1)`, epoch).Scan(&settled); err != nil {
				return err
			}
			if settled == nil {
				answer = "fenced"
				return nil
			}
			err := tx.QueryRow(t.Context(), `SELECT walpost_advance('test', 0, $1, $2, 'test', $3, $4)`, epoch, sequence, id, m.Time).Scan(&answer)
			if err == nil && answer == "apply" {
				_, err = tx.Exec(t.Context(), insertSQL, id, "a", 1, epoch)
			}
			return err
		}))
		return answer
	}
	want := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("it answers %s, want %s", got, want)
		}
	}
	for n := uint64(1); n <= 5; n++ {
		want(handle(n), "apply")
	}
	want(handle(5), "skip") // its sequence is settled
	want(handle(6), "skip") // its event was handled
	cfg := r.config()
	cfg.Partitions = 1
	x := r.run(cfg, effect)
	time.Sleep(500 * time.Millisecond)
	r.is(`SELECT count(*) FROM effects`, "5") // the connection has the lock
	r.must(conn.Close(t.Context()))
	r.effects(19)
	r.put(1, 1)
	r.effects(20)
	conn, err = pgx.Connect(t.Context(), r.url)
	r.must(err)
	want(handle(21), "fenced")
	r.is(`SELECT count(*) FROM walpost_take('test', 0, 1)`, "0")
	x.halt()
	epoch, sequence := take()
	if sequence != 21 {
		t.Errorf("it goes on behind %d", sequence)
	}
	r.put(1, 1)
	want(handle(22), "apply")

	fails := func(sql, code string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != code || refused.Hint == "" {
			t.Errorf("%s fails with %v, want %s and a hint", sql, err, code)
		}
	}
	fails(`SELECT walpost_advance('test', 0, 1, 99, 'test', '99', now())`, "55000") // each statement commits
	fails(`SELECT walpost_define('test', 'OTHER', 1, 0)`, "22023")
	fails(`SELECT walpost_take('test', 0, 2)`, "22023")
	fails(`SELECT walpost_take('test', 1, 1)`, "22023")
	fails(`SELECT walpost_take('unknown', 0, 1)`, "22023")
	fails(fmt.Sprintf(`BEGIN; SELECT walpost_claim('test', 0, %d); COMMIT; SELECT walpost_advance('test', 0, 1, 99, 'test', '99', now())`, epoch), "55000")
	_, err = conn.Exec(t.Context(), `ROLLBACK`)
	r.must(err)
	fails(fmt.Sprintf(`SELECT walpost_claim('test', 0, %d), walpost_advance('test', 0, %[1]d, 99, 'test', '', now())`, epoch), "22023")
}
