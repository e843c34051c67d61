package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// work is what a handler does in its transaction.
type work func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error

// transaction is a handler that says 418 where Tx failed.
func transaction(f work, failed ...func(error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error { return f(r.Context(), tx, w) })
		for _, f := range failed {
			f(err)
		}
		if err != nil {
			http.Error(w, "failed", http.StatusTeapot)
		}
	}
}

func TestEffectOutboxRowAndResponseCommitTogether(t *testing.T) {
	b := newBench(t)
	b.exec(`CREATE TABLE outbox_messages (id BIGINT GENERATED ALWAYS AS IDENTITY, tenant_id BIGINT, aggregate_type TEXT, aggregate_id BIGINT, event_type TEXT,
		event_version SMALLINT, payload JSONB, occurred_at TIMESTAMPTZ, available_at TIMESTAMPTZ, trace_id TEXT)`)
	var fail atomic.Bool
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		if err := insertEffect(ctx, tx, w); err != nil {
			return err
		}
		_, err := outbox.Insert(ctx, tx, outbox.Message{AggregateType: "order", AggregateID: 1, EventType: "order.placed", Payload: []byte(`{}`)})
		if fail.Load() {
			return errors.New("no")
		}
		return err
	}))
	const xmins = `SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM effects UNION ALL SELECT xmin FROM outbox_messages UNION ALL SELECT xmin FROM idempotency_keys) x`
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false)
	b.wantText("transactions", xmins, "1")
	fail.Store(true)
	c.want(c.post("/", "k2", ""), 418, "failed\n", false)
	c.want(c.post("/", "k2", ""), 418, "failed\n", true)
	b.wantEffects(1)
	b.wantText("events", `SELECT count(*) FROM outbox_messages`, "1")
	b.wantRow("completed 201, failed 418")
}

// What f wrote before it failed is discarded, and where the handler writes nothing then, it is 500.
func TestErrorDiscardsTheResponse(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Before", "kept")
		_ = idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
			w.Header().Set("X-Inside", "lost")
			_ = insertEffect(r.Context(), tx, w)
			return errors.New("no")
		})
	})
	for _, replayed := range []bool{false, true} {
		a := c.post("/", "k", "")
		if c.want(a, 500, "*", replayed); a.header.Get("X-Inside") != "" || strings.Contains(a.body, "id") {
			t.Errorf("%v %s", a.header, a.body)
		}
	}
	b.wantEffects(0)
}

func TestFailureStatusRollsBack(t *testing.T) {
	b := newBench(t)
	var calls atomic.Int32
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		calls.Add(1)
		_, err := tx.Exec(ctx, `INSERT INTO effects DEFAULT VALUES`)
		w.WriteHeader(402)
		fmt.Fprint(w, "no money")
		return err
	}))
	c.want(c.post("/", "k", ""), 402, "no money", false)
	c.want(c.post("/", "k", ""), 402, "no money", true)
	if b.wantEffects(0); calls.Load() != 1 {
		t.Errorf("%d calls", calls.Load())
	}
	b.wantRow("failed 402")
}

func TestMisuseOfTx(t *testing.T) {
	b := newBench(t)
	nothing := func(pgx.Tx, http.ResponseWriter) error { return nil }
	ok := func(_ pgx.Tx, w http.ResponseWriter) error { w.WriteHeader(204); return nil }
	for name, m := range map[string]struct {
		h      func(w http.ResponseWriter, r *http.Request) error
		want   error
		status int
	}{
		"no-response": {func(w http.ResponseWriter, r *http.Request) error {
			return idempotency.Tx(r.Context(), nothing)
		}, idempotency.ErrNoResponse, 500},
		"response-first": {func(w http.ResponseWriter, r *http.Request) error {
			fmt.Fprint(w, "early")
			return idempotency.Tx(r.Context(), ok)
		}, idempotency.ErrBegun, 200},
		"twice": {func(w http.ResponseWriter, r *http.Request) error {
			return errors.Join(idempotency.Tx(r.Context(), ok), idempotency.Tx(r.Context(), ok))
		}, idempotency.ErrDecided, 204},
		"write-after-it": {func(w http.ResponseWriter, r *http.Request) error {
			err := idempotency.Tx(r.Context(), ok)
			w.WriteHeader(500)
			_, after := w.Write([]byte("late"))
			return errors.Join(err, after)
		}, idempotency.ErrDecided, 204},
		"nested": {func(w http.ResponseWriter, r *http.Request) error {
			return idempotency.Tx(r.Context(), func(pgx.Tx, http.ResponseWriter) error { return idempotency.Tx(r.Context(), ok) })
		}, idempotency.ErrBusy, 500},
		"no-middleware": {func(w http.ResponseWriter, r *http.Request) error {
			return idempotency.Tx(context.Background(), ok)
		}, idempotency.ErrNoRequest, 200},
		"own-commit": {func(w http.ResponseWriter, r *http.Request) error {
			return idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
				w.WriteHeader(201)
				_, err := tx.Exec(r.Context(), `COMMIT`)
				return err
			})
		}, idempotency.ErrEnded, 500},
		"own-transaction": {func(w http.ResponseWriter, r *http.Request) error {
			return idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
				w.WriteHeader(201)
				_, err := tx.Exec(r.Context(), `COMMIT; BEGIN`)
				return err
			})
		}, idempotency.ErrEnded, 500},
	} {
		var calls atomic.Int32
		var got atomic.Value
		c := b.serve(func(w http.ResponseWriter, r *http.Request) {
			calls.Add(1)
			if err := m.h(w, r); err != nil {
				got.Store(err)
			}
		})
		for _, replayed := range []bool{false, true} {
			c.want(c.post("/", name, ""), m.status, "*", replayed)
		}
		if err, _ := got.Load().(error); !errors.Is(err, m.want) || calls.Load() != 1 {
			t.Errorf("%s: %v after %d calls, want %v", name, got.Load(), calls.Load(), m.want)
		}
	}
	var leaked pgx.Tx
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		leaked = tx
		if tx.Commit(ctx) == nil || tx.Rollback(ctx) == nil {
			t.Error("the transaction can be ended")
		}
		return insertEffect(ctx, tx, w)
	}))
	c.want(c.post("/", "leak", ""), 201, "*", false)
	if _, err := leaked.Exec(t.Context(), `SELECT 1`); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("after the commit: %v", err)
	}
	b.wantEffects(1)
}

func TestTxAgainAfterAnError(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		for i := range 2 {
			_ = idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
				if err := insertEffect(r.Context(), tx, w); err != nil || i == 1 {
					return err
				}
				return errors.New("no")
			})
		}
	})
	c.want(c.post("/", "k", ""), 201, `{"id": 2}`, false)
	b.wantEffects(1)
}

func TestNestedTransactionIsASavepoint(t *testing.T) {
	b := newBench(t)
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		_, _ = nested.Exec(ctx, `INSERT INTO nowhere VALUES (1)`)
		return errors.Join(nested.Rollback(ctx), insertEffect(ctx, tx, w))
	}))
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false)
}

// Nothing is sent before the commit, so a commit that fails is a failure, also for the client.
func TestCommitFails(t *testing.T) {
	b := newBench(t)
	b.exec(failAtCommit)
	var got atomic.Value
	c := b.serve(transaction(insertEffect, func(err error) { got.Store(fmt.Sprint(err)) }))
	c.want(c.post("/", "k", ""), 418, "failed\n", false)
	c.want(c.post("/", "k", ""), 418, "failed\n", true)
	if text := got.Load().(string); !strings.Contains(text, "commit transaction: ERROR: refused at commit") {
		t.Errorf("error %s", text)
	}
	b.wantEffects(0)
	b.wantRow("failed 418")
}

// Two transactions that exclude each other: one gets 40001, its key is free, and a repetition succeeds.
func TestSerializationFailureReleasesTheKey(t *testing.T) {
	b := newBench(t, "default_transaction_isolation=serializable")
	b.exec(`CREATE TABLE account (id INT PRIMARY KEY, balance INT); INSERT INTO account VALUES (1, 100), (2, 100)`)
	var inside sync.WaitGroup
	inside.Add(2)
	var first sync.Map
	withdraw := transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		var sum int
		if err := tx.QueryRow(ctx, `SELECT sum(balance) FROM account`).Scan(&sum); err != nil {
			return err
		}
		key := ctx.Value(keyInTest{}).(string)
		if _, again := first.LoadOrStore(key, true); !again {
			inside.Done()
			inside.Wait()
		}
		_, err := tx.Exec(ctx, `UPDATE account SET balance = balance - 10 WHERE id = $1`, 1+len(key)%2)
		w.WriteHeader(201)
		return err
	})
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		withdraw(w, r.WithContext(context.WithValue(r.Context(), keyInTest{}, r.Header.Get("Idempotency-Key"))))
	})
	var all sync.WaitGroup
	var failed atomic.Int32
	for _, key := range []string{"a", "bb"} {
		all.Go(func() {
			a := c.post("/", key, "")
			if a.status == 503 && a.header.Get("Retry-After") == "1" {
				failed.Add(1)
				a = c.post("/", key, "")
			}
			c.want(a, 201, "", false)
		})
	}
	all.Wait()
	if failed.Load() != 1 {
		t.Errorf("%d transactions failed", failed.Load())
	}
	b.wantText("balance", `SELECT sum(balance) FROM account`, "180")
}

type keyInTest struct{}

// What passes is not stored for a day: the key is released, whatever the handler writes, and the client told to
// repeat the request.
func TestPassingErrorsReleaseTheKey(t *testing.T) {
	raise := func(code string) work {
		return func(ctx context.Context, tx pgx.Tx, _ http.ResponseWriter) error {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '`+code+`'; END $$`)
			return fmt.Errorf("wrapped: %w", err)
		}
	}
	b := newBench(t)
	for name, f := range map[string]work{
		"40001": raise("40001"), "40P01": raise("40P01"), "55P03": raise("55P03"), "57014": raise("57014"), "53200": raise("53200"), "08006": raise("08006"),
		"panic":  func(context.Context, pgx.Tx, http.ResponseWriter) error { panic("oh") },
		"goexit": func(context.Context, pgx.Tx, http.ResponseWriter) error { runtime.Goexit(); return nil },
		"cancel": func(context.Context, pgx.Tx, http.ResponseWriter) error {
			return fmt.Errorf("call: %w", context.Canceled)
		},
		"terminated": func(ctx context.Context, tx pgx.Tx, _ http.ResponseWriter) error {
			_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return errors.New("hidden")
		},
		"timeout": func(ctx context.Context, _ pgx.Tx, _ http.ResponseWriter) error {
			<-ctx.Done()
			return errors.New("hidden")
		},
		"timeout-in-a-statement": func(ctx context.Context, tx pgx.Tx, _ http.ResponseWriter) error {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(100)`)
			return err
		},
	} {
		var calls atomic.Int32
		c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			if err := insertEffect(ctx, tx, w); err != nil {
				return err
			}
			if calls.Add(1) == 1 {
				return f(ctx, tx, w)
			}
			return nil
		}), func(o *idempotency.Options) {
			if strings.HasPrefix(name, "timeout") {
				o.Timeout = 300 * time.Millisecond
			}
		})
		before := b.text(`SELECT count(*) FROM effects`)
		a, err := c.try(t.Context(), "POST", "/", name, "")
		if name == "goexit" && err != nil {
			b.waitFor(`SELECT count(*) FROM idempotency_keys WHERE key = 'goexit'`, "0")
		} else if err != nil || a.status != 503 || a.header.Get("Retry-After") != "1" {
			t.Errorf("%s: %d %s, %v", name, a.status, a.body, err)
		}
		if after := b.text(`SELECT count(*) FROM effects`); after != before {
			t.Errorf("%s: the effect was committed", name)
		}
		for patience := time.Now(); a.status != 201 && time.Since(patience) < testenv.Patience; a = c.post("/", name, "") {
		}
		c.want(c.post("/", name, ""), 201, a.body, true)
	}
	b.wantLog("handler panicked")
}

// An error that hides why a statement failed: the response is the handler's, and a repetition is executed.
func TestHiddenErrorIsNotStored(t *testing.T) {
	b := newBench(t)
	for name, end := range map[string]error{"hidden": errors.New("no"), "swallowed": nil} {
		var calls atomic.Int32
		c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			if calls.Add(1) == 1 {
				_, _ = tx.Exec(ctx, `INSERT INTO nowhere VALUES (1)`)
				w.WriteHeader(201)
				return end
			}
			return insertEffect(ctx, tx, w)
		}))
		c.want(c.post("/", name, ""), 418, "failed\n", false)
		c.want(c.post("/", name, ""), 201, "*", false)
		c.want(c.post("/", name, ""), 201, "*", true)
	}
}

// A pool of one connection is enough: the claim gives it back, and Tx uses no other.
func TestPoolOfOneConnection(t *testing.T) {
	b := newBench(t, "pool_max_conns=1")
	c := b.serveHandler(idempotency.WithLease(b.pool, b.options(), 90*time.Millisecond)(transaction(
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(0.3)`) // several renewals
			return errors.Join(err, insertEffect(ctx, tx, w))
		})))
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			a := c.post("/", fmt.Sprint(i), "")
			c.want(a, 201, "*", false)
			c.want(c.post("/", fmt.Sprint(i), ""), 201, a.body, true)
		})
	}
	all.Wait()
	b.wantEffects(8)
}
