package drill

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// EventType is that of the events that a drill writes.
const EventType = "walpost.drilled"

const (
	// aggregates is how many aggregates the drill's events are of.
	aggregates = 8
	// quickest is the shortest pause between two statements: more events come in one.
	quickest = 10 * time.Millisecond
	// insertLimit ends a statement whose server is gone without a word.
	insertLimit = 10 * time.Second
)

// MostRate bounds Config.Rate: what one connection writes.
const MostRate = 5000

// payload is that of the drill's events. N counts them, in the order of their commits.
type payload struct {
	Drill string `json:"drill"`
	N     int    `json:"n"`
}

// event is one that was written. Its commit was answered, unless doubtful is set.
type event struct {
	n         int
	id        string // of the row, "" where doubtful
	committed time.Time
	doubtful  bool
}

// load writes events until stop. Its goroutine owns conn; mu guards events.
type load struct {
	d        *Drill
	inserter outbox.Inserter
	id       func(n int) any // of a row, nil where the table makes it
	of       func(n int) any // the aggregate's id
	drill    string          // tells this drill's events from others'
	cancel   context.CancelFunc
	done     chan struct{}

	mu     sync.Mutex
	events []event
}

func newLoad(ctx context.Context, d *Drill) (*load, error) {
	t := d.cfg.Outboxes[0]
	l := &load{d: d, drill: rand.Text(), inserter: outbox.Inserter{Table: t.String(), Layout: t.Layout}}
	if d.cfg.Rate == 0 {
		return l, nil
	}
	if t.Shard != (outbox.Shard{}) {
		return nil, hint.Errorf(ownTraffic, "write events into %s: its other shards are other relays'", t)
	}
	return l, l.try(ctx, t)
}

const ownTraffic = "--rate 0 writes no events: the drill then watches those of the system"

// connect returns a connection with the role's own search_path, as an application has it: triggers of the
// outbox may need it. The statements that are sent name everything by its schema.
func (l *load) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := table.Connect(ctx, l.d.cfg.Postgres)
	if err != nil {
		return nil, err
	}
	const sql = `SELECT pg_catalog.set_config('search_path',
		pg_catalog.current_setting('walpost.search_path'), false)`
	if _, err := conn.Exec(ctx, sql); err != nil {
		return nil, errors.Join(fmt.Errorf("set search_path: %w", err), conn.Close(ctx))
	}
	return conn, nil
}

func (l *load) message(n int) outbox.Message {
	text, _ := json.Marshal(payload{l.drill, n}) // it always encodes
	m := outbox.Message{ID: l.id(n), EventType: EventType, Payload: text}
	if l.inserter.Layout.Has(outbox.AggregateType) {
		m.AggregateType = "walpost.drill"
	}
	if l.inserter.Layout.Has(outbox.AggregateID) {
		m.AggregateID = l.of(n)
	}
	return m
}

// aggregate names what an event keeps its order in: nothing but itself, where the table has no aggregates or
// the order is not promised.
func (l *load) aggregate(n int) string {
	if t := l.d.cfg.Outboxes[0]; t.Layout.Has(outbox.AggregateID) && table.Ordered(t) {
		n = numberOf(n)
	}
	return strconv.Itoa(n)
}

func (l *load) start(ctx context.Context) {
	ctx, l.cancel = context.WithCancel(ctx)
	l.done = make(chan struct{})
	go l.run(ctx)
}

// stop returns when the last statement has ended.
func (l *load) stop() {
	if l.cancel != nil {
		l.cancel()
		<-l.done
	}
}

func (l *load) run(ctx context.Context) {
	defer close(l.done)
	if l.d.cfg.Rate == 0 {
		return
	}
	for ctx.Err() == nil {
		l.session(ctx)
		sleep.For(ctx, 100*time.Millisecond)
	}
}

// session writes over one connection, with the role's own synchronous_commit: what the server acknowledges is
// as safe as an application's events.
func (l *load) session(ctx context.Context) {
	conn, err := l.connect(ctx)
	if err != nil {
		return
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // its statements have ended
	pause := max(time.Second/time.Duration(l.d.cfg.Rate), quickest)
	for begun, written := time.Now(), 0; ; {
		due := int(time.Since(begun).Seconds()*float64(l.d.cfg.Rate)) - written
		if due > 0 {
			if err := l.write(conn, min(due, l.d.cfg.Rate)); err != nil {
				return
			}
			written += due
		}
		if !sleep.For(ctx, pause) {
			return
		}
	}
}

// write is not cancelled with the load: an event whose commit is not answered would be in doubt.
func (l *load) write(conn *pgx.Conn, count int) error {
	ctx, cancel := context.WithTimeout(context.Background(), insertLimit)
	defer cancel()
	messages := make([]outbox.Message, count)
	first := len(l.events) // it is the only one to append
	for i := range messages {
		messages[i] = l.message(first + i)
	}
	ids, err := l.inserter.InsertMany(ctx, conn, messages)
	at := time.Now()
	if err != nil && !conn.IsClosed() {
		return err // the server has said no
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range messages {
		e := event{n: first + i, committed: at, doubtful: err != nil}
		if err == nil {
			e.id = ids[i]
		}
		l.events = append(l.events, e)
	}
	return err
}

// written is a copy of what was written so far.
func (l *load) written() []event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]event(nil), l.events...)
}

// read tells which event of this drill a payload is of.
func (l *load) read(text []byte) (n int, own bool) {
	var p payload
	if json.Unmarshal(text, &p) != nil || p.Drill != l.drill {
		return 0, false
	}
	return p.N, true
}
