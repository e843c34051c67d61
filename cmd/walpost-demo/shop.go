package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

const (
	// writers are enough for a disk that takes some milliseconds to sync.
	writers = 8
	// openOrders is how many orders are on their way through the shop: few
	// enough for two writers to meet at the same one.
	openOrders = 64
	// One in so many transactions is rolled back, after it has written.
	rollback = 20
	// backlog is how much a writer that was held up catches up on.
	backlog = time.Second
)

const createOrders = `
CREATE TABLE orders (
    id       BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer TEXT NOT NULL,
    total    NUMERIC(10, 2) NOT NULL,
    status   TEXT NOT NULL DEFAULT 'created',
    events   INT  NOT NULL DEFAULT 1 -- how many have been written for it
)`

const insertOrder = `
INSERT INTO orders (customer, total) VALUES ($1, $2::bigint / 100.0)
RETURNING id, status, events`

// The UPDATE locks the order, so another writer of it waits for this transaction's
// end. Therefore the events of an order are in the order of its commits. Being paid
// makes two events.
const advanceOrder = `
UPDATE orders SET
    status = CASE status
        WHEN 'created' THEN 'paid' WHEN 'paid' THEN 'packed' WHEN 'packed' THEN 'shipped'
        ELSE 'delivered' END,
    events = events + CASE status WHEN 'created' THEN 2 ELSE 1 END
WHERE id = $1 AND status <> 'delivered'
RETURNING id, status, events`

// order is a row of orders as one transaction sees it.
type order struct {
	id     int64
	status string
	events int
}

// event is the payload. Step counts the events of one order from 1, without a
// gap, because it is rolled back with the order.
type event struct {
	Order  int64  `json:"order"`
	Step   int    `json:"step"`
	Status string `json:"status"`
}

// shop writes orders and their events.
type shop struct {
	conns   []*pgx.Conn
	commits latency // of COMMIT, as the writers wait for it

	events, transactions, rolledBack atomic.Int64

	mu   sync.Mutex
	open []int64 // orders that are not delivered yet; guarded by mu
}

// openShop creates the shop's table and connects the writers. Close it.
func openShop(ctx context.Context, url string) (*shop, error) {
	s := &shop{}
	for range writers {
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open the shop: %w", err), s.close())
		}
		s.conns = append(s.conns, conn)
	}
	if _, err := s.conns[0].Exec(ctx, createOrders); err != nil {
		return nil, errors.Join(fmt.Errorf("create table orders: %w", err), s.close())
	}
	return s, nil
}

func (s *shop) close() error {
	var err error
	for _, c := range s.conns {
		err = errors.Join(err, c.Close(context.Background()))
	}
	return err
}

// run commits so many transactions per second until ctx is done, or one fails.
func (s *shop) run(ctx context.Context, rate int) error {
	g, ctx := errgroup.WithContext(ctx)
	pause := time.Duration(writers) * time.Second / time.Duration(rate)
	for i, conn := range s.conns {
		first := time.Now().Add(time.Duration(i) * pause / writers)
		g.Go(func() error { return s.write(ctx, conn, first, pause) })
	}
	return g.Wait()
}

// write is one writer.
func (s *shop) write(ctx context.Context, conn *pgx.Conn, next time.Time, pause time.Duration) error {
	for sleep.For(ctx, time.Until(next)) {
		if err := s.sell(ctx, conn); err != nil {
			return err
		}
		next = next.Add(pause)
		if oldest := time.Now().Add(-backlog); next.Before(oldest) {
			next = oldest
		}
	}
	return nil
}

// sell commits one transaction, after those that are rolled back. What has begun
// is finished although ctx is done: its fate is then known.
func (s *shop) sell(ctx context.Context, conn *pgx.Conn) error {
	for {
		committed, err := s.transact(context.WithoutCancel(ctx), conn)
		if err != nil {
			return fmt.Errorf("write an order: %w", err)
		}
		if committed {
			return nil
		}
	}
}

// transact changes an order and writes what happened to it into the outbox, in
// one transaction: both are committed, or neither.
func (s *shop) transact(ctx context.Context, conn *pgx.Conn) (committed bool, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return false, err
	}
	// After a commit it does nothing, and otherwise there is an error already.
	defer tx.Rollback(ctx) //nolint:errcheck // see above
	o, err := s.work(ctx, tx)
	if err != nil {
		return false, err
	}
	types := eventTypes(o.status)
	for i, t := range types {
		if err := insert(ctx, tx, o, t, o.events-len(types)+i+1); err != nil {
			return false, err
		}
	}
	if rand.IntN(rollback) == 0 {
		s.rolledBack.Add(1)
		return false, tx.Rollback(ctx)
	}
	begun := time.Now()
	if err := tx.Commit(ctx); err != nil {
		return false, err
	}
	s.commits.observe(time.Since(begun))
	s.transactions.Add(1)
	s.events.Add(int64(len(types)))
	s.keep(o)
	return true, nil
}

func eventTypes(status string) []string {
	if status == "paid" {
		return []string{"order.paid", "order.invoiced"}
	}
	return []string{"order." + status}
}

func insert(ctx context.Context, tx pgx.Tx, o order, eventType string, step int) error {
	payload, err := json.Marshal(event{Order: o.id, Step: step, Status: o.status})
	if err != nil {
		return err
	}
	_, err = outbox.Insert(ctx, tx, outbox.Message{
		AggregateType: "order", AggregateID: o.id, EventType: eventType, Payload: payload,
	})
	return err
}

// work takes an open order a step further, or takes a new one.
func (s *shop) work(ctx context.Context, tx pgx.Tx) (o order, err error) {
	if id, ok := s.pick(); ok {
		err = tx.QueryRow(ctx, advanceOrder, id).Scan(&o.id, &o.status, &o.events)
		if !errors.Is(err, pgx.ErrNoRows) {
			return o, err
		} // another writer has just delivered it
	}
	customer, cents := customers[rand.IntN(len(customers))], 100+rand.IntN(50_000)
	err = tx.QueryRow(ctx, insertOrder, customer, cents).Scan(&o.id, &o.status, &o.events)
	return o, err
}

var customers = []string{
	"Ada", "Barbara", "Dennis", "Edsger", "Grace", "Jim",
	"Ken", "Leslie", "Margaret", "Michael", "Radia", "Tony",
}

func (s *shop) pick() (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.open) < openOrders {
		return 0, false
	}
	return s.open[rand.IntN(len(s.open))], true
}

// keep notes what a committed transaction has made of the order.
func (s *shop) keep(o order) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch o.status {
	case "created":
		s.open = append(s.open, o.id)
	case "delivered":
		s.open = slices.DeleteFunc(s.open, func(id int64) bool { return id == o.id })
	}
}
