package consume

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
)

// member divides the partitions with the consumer's other processes: each takes its share, and as many as it
// can get of those that no process has.
type member struct {
	*consumer
	conn  *pgx.Conn // holds the locks
	feed  *feed
	owned map[int]*owned
	ended chan *owned // partitions whose goroutine returned
}

// owned is a partition that this process has the lock of.
type owned struct {
	*partition
	stop     func()
	stopping bool // to give it to another process
	done     chan struct{}
}

// tickPause is how often partitions without an owner are looked for.
const (
	tickPause   = 300 * time.Millisecond
	tickTimeout = 30 * time.Second
)

func newMember(c *consumer, conn *pgx.Conn) *member {
	return &member{consumer: c, conn: conn, owned: map[int]*owned{}, ended: make(chan *owned, maxPartitions)}
}

// run returns when every goroutine that it started has ended.
func (m *member) run(ctx context.Context) error {
	reading, end := context.WithCancelCause(context.WithoutCancel(ctx))
	defer end(nil)
	hard, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	m.feed = &feed{
		consumer: m.consumer, ctx: reading, fail: end,
		queues: map[int]*queue{}, readers: map[*reader]bool{},
	}
	m.metrics.observe(m.feed)
	var watch sync.WaitGroup
	watch.Go(func() { m.feed.watch(reading) })
	err := m.ticks(ctx, reading, hard)
	end(err)
	m.waitForHandlers(ctx, kill)
	m.feed.running.Wait()
	watch.Wait()
	m.metrics.observe(nil)
	return err
}

// ticks keeps the locks until the session ends.
func (m *member) ticks(ctx, reading, hard context.Context) error {
	ticker := time.NewTicker(tickPause)
	defer ticker.Stop()
	// A statement that is broken off ends its connection, and so the locks.
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(m.Grace, end) })()
	for {
		if err := m.tick(work, reading, hard); err != nil {
			return err
		}
		m.waits.over("run")
		select {
		case <-ctx.Done():
			return nil
		case <-reading.Done():
			return context.Cause(reading)
		case o := <-m.ended:
			if err := m.give(work, o); err != nil {
				return err
			}
		case <-ticker.C:
		}
	}
}

// waitForHandlers lets transactions go on for a while where the process stops. Where the locks are lost,
// others have the partitions.
func (m *member) waitForHandlers(ctx context.Context, kill func()) {
	if ctx.Err() == nil {
		kill()
	}
	timer := time.AfterFunc(m.Grace, kill)
	defer timer.Stop()
	for _, o := range m.owned {
		o.stop()
	}
	for _, o := range m.owned {
		m.keepLocks(ctx, o.done)
		m.feed.remove(o.queue)
	}
}

// keepLocks waits, and lets the server not take the connection of the locks for one of a frozen process.
func (m *member) keepLocks(ctx context.Context, done <-chan struct{}) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statementTimeout)
			_, _ = m.conn.Exec(ctx, `SELECT 1`) // without the locks others may begin: their epochs are higher
			cancel()
		}
	}
}

// tick takes partitions that have no owner while this process has less than its share, and gives those back
// that are more.
func (m *member) tick(ctx, reading, hard context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tickTimeout)
	defer cancel()
	share, err := m.share(ctx)
	if err != nil {
		return fmt.Errorf("look at the consumer's processes: %w", err)
	}
	var taken []*partition
	for _, key := range rand.Perm(m.Partitions) {
		if m.owned[key] != nil || len(m.owned)+len(taken) >= share {
			continue
		}
		p, err := m.take(ctx, key)
		if errors.Is(err, errBusy) {
			break // others may be as busy, and the tick has to end
		}
		if err != nil {
			return fmt.Errorf("take partition %d: %w", key, err)
		}
		if p != nil {
			taken = append(taken, p)
		}
	}
	if err := m.locate(ctx, taken); err != nil {
		return err
	}
	m.begin(taken, reading, hard)
	m.giveBack(len(m.owned) - share)
	return m.checkEpochs(ctx)
}

const epochsSQL = `SELECT partition_key, epoch FROM {offsets} WHERE consumer_name = $1`

// checkEpochs gives partitions back that were rewound. One that has events notices it by itself.
func (m *member) checkEpochs(ctx context.Context) error {
	rows, err := m.conn.Query(ctx, m.sql(epochsSQL), m.Name)
	if err != nil {
		return err
	}
	var key int
	var epoch int64
	_, err = pgx.ForEachRow(rows, []any{&key, &epoch}, func() error {
		if o := m.owned[key]; o != nil && o.epoch != epoch {
			o.giveBack()
		}
		return nil
	})
	return err
}

func (o *owned) giveBack() {
	o.stopping = true
	o.stop()
}

func (m *member) giveBack(n int) {
	for _, o := range m.owned {
		if o.stopping {
			n--
		}
	}
	for _, o := range m.owned {
		if n > 0 && !o.stopping {
			o.giveBack()
			n--
		}
	}
}

const membersSQL = `SELECT count(*) FROM pg_locks
	WHERE locktype = 'advisory' AND granted AND mode = 'ShareLock'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND (classid::bigint << 32 | objid::bigint) = $1 AND objsubid = 1`

// share is how many partitions this process should have.
func (m *member) share(ctx context.Context) (int, error) {
	var members int
	err := m.conn.QueryRow(ctx, membersSQL, m.lockKey(consumers.Members)).Scan(&members)
	if err != nil {
		return 0, err
	}
	members = max(members, 1)
	return (m.Partitions + members - 1) / members, nil
}

// begin starts the goroutines of partitions that were taken.
func (m *member) begin(taken []*partition, reading, hard context.Context) {
	if len(taken) == 0 {
		return
	}
	starts := make([]start, len(taken))
	for i, p := range taken {
		starts[i] = start{p.queue, p.begins, p.anchor}
	}
	m.feed.add(starts)
	for _, p := range taken {
		stopping, stop := context.WithCancel(reading)
		o := &owned{partition: p, stop: stop, done: make(chan struct{})}
		m.owned[p.key] = o
		go func() {
			defer stop()
			p.run(stopping, hard)
			close(o.done)
			m.ended <- o
		}()
	}
}

// take locks a partition and raises its epoch, so that its earlier owner cannot commit. It returns nil where
// another process has it.
func (m *member) take(ctx context.Context, key int) (*partition, error) {
	var locked bool
	err := m.conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, m.lockKey(key)).Scan(&locked)
	if err != nil || !locked {
		return nil, err
	}
	p := &partition{consumer: m.consumer, key: key, queue: newQueue(m.feed, key)}
	if err := p.takeOver(ctx, m.conn); err != nil {
		if pg.Code(err) == pgerrcode.LockNotAvailable {
			return nil, errors.Join(m.unlock(ctx, key), errBusy)
		}
		return nil, err
	}
	return p, nil
}

// errBusy means that a transaction of the partition's earlier owner still runs.
var errBusy = errors.New("a transaction of the earlier owner still runs")

// give returns a partition's lock when its goroutine has ended.
func (m *member) give(ctx context.Context, o *owned) error {
	m.feed.remove(o.queue)
	delete(m.owned, o.key)
	return m.unlock(ctx, o.key)
}

func (m *member) unlock(ctx context.Context, key int) error {
	_, err := m.conn.Exec(ctx, `SELECT pg_advisory_unlock($1)`, m.lockKey(key))
	return err
}

// A partition without a message yet begins, in another stream, with what that stored after the consumer was
// created, or with all of it.
const takeOverSQL = `UPDATE {offsets} o SET epoch = o.epoch + 1 FROM {definitions} d
	WHERE o.consumer_name = $1 AND o.partition_key = $2 AND d.consumer_name = o.consumer_name
	RETURNING o.epoch, o.last_processed_id, coalesce(o.anchor_sequence, 0), coalesce(o.anchor_message_id, ''),
		o.anchor_stored_at, coalesce(o.anchor_position, ''), o.stream_created_at,
		coalesce(o.anchor_stored_at, o.last_processed_at,
			CASE WHEN d.start_at <> 'all' THEN d.created_at + interval '1 hour' END)`

// takeOver reads where the partition is.
func (p *partition) takeOver(ctx context.Context, conn *pgx.Conn) error {
	var offset, anchored int64
	var stored *time.Time
	err := conn.QueryRow(ctx, p.sql(takeOverSQL), p.Name, p.key).
		Scan(&p.epoch, &offset, &anchored, &p.anchor.id, &stored, &p.anchor.position, &p.created, &p.since)
	if errors.Is(err, pgx.ErrNoRows) {
		return errFenced // the number of partitions was changed
	} else if err != nil {
		return err
	}
	p.offset, p.anchor.seq = uint64(offset), uint64(anchored)
	if stored != nil {
		p.anchor.at = *stored
	}
	return nil
}

// locate checks that the stream is still the one that the partitions' positions are of, and moves those that
// are not.
func (m *member) locate(ctx context.Context, taken []*partition) error {
	if len(taken) == 0 {
		return nil
	}
	found := make([]error, len(taken))
	err := sure(ctx, func(ctx context.Context) error {
		info, err := m.stream.Info(ctx)
		if err != nil {
			return err
		}
		var asking sync.WaitGroup
		for i, p := range taken {
			asking.Go(func() { found[i] = p.locate(ctx, info) })
		}
		asking.Wait()
		return errors.Join(found...)
	})
	if !errors.Is(err, jetstream.ErrNotTheStream) {
		return err
	}
	for i, p := range taken {
		switch err := found[i]; {
		case err == nil:
		case !errors.Is(err, jetstream.ErrNotTheStream):
			return err
		default:
			if err := p.relocate(ctx, m.conn, err); err != nil {
				return err
			}
		}
	}
	return nil
}
