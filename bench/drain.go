package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

// Setting is the configuration of a relay.
type Setting struct {
	URL, Mark, Batch string
	// The relay has shard Index of Of, counted from 1. With Of 1 it has all aggregates.
	Index, Of int
}

func (s Setting) String() string {
	name := "walpost, mark " + s.Mark + s.batches()
	if s.Of > 1 {
		name = fmt.Sprintf("%d relays: %s", s.Of, name)
	}
	return name
}

func (s Setting) batches() string {
	if s.Batch == "single" {
		return ""
	}
	return ", " + s.Batch + " batches"
}

// suffix tells the names of one relay from another's.
func (s Setting) suffix() string {
	if s.Of <= 1 {
		return ""
	}
	return fmt.Sprintf("_%d", s.Index)
}

// Slot is the name of the relay's slot and publication.
func (s Setting) Slot() string { return Slot + s.suffix() }

// Stream is the name of the relay's stream.
func (s Setting) Stream() string { return Stream + s.suffix() }

// Subject is the template of the relay's subjects.
func (s Setting) Subject() string { return "walpost_bench" + s.suffix() + ".{event_type}" }

// Shard is the value of the configuration key for the shard.
func (s Setting) Shard() string {
	if s.Of <= 1 {
		return ""
	}
	return fmt.Sprintf("%d/%d", s.Index, s.Of)
}

// table is the outbox, with its schema.
func (s Setting) table() string {
	if s.Mark == "journal" {
		return "public.outbox_events"
	}
	return "public.outbox_messages"
}

// truncate empties tables that refuse that, as do their partitions.
func truncate(tables ...string) (statements []string) {
	for _, name := range tables {
		trigger := func(change string) string {
			return fmt.Sprintf(`DO $$
				DECLARE t regclass;
				BEGIN
					FOR t IN SELECT relid FROM pg_partition_tree('public.%[1]s')
						UNION SELECT 'public.%[1]s' LOOP
						EXECUTE format('ALTER TABLE %%s %[2]s TRIGGER outbox_no_truncate', t);
					END LOOP;
				END $$`, name, change)
		}
		statements = append(statements,
			trigger("DISABLE"), `TRUNCATE public.`+name+` RESTART IDENTITY`, trigger("ENABLE ALWAYS"))
	}
	return statements
}

// parts are the settings of all relays that share the rows.
func (s Setting) parts() []Setting {
	all := make([]Setting, max(1, s.Of))
	for i := range all {
		all[i] = s
		all[i].Index = i + 1
	}
	return all
}

// prepare recreates streams and slots and empties the table. The relays then deliver some rows, so that each
// has a position in its stream and takes its rows from its slot, and the backlog is committed.
func (b *bench) prepare(ctx context.Context, set Setting, rows int) error {
	if err := b.deleteStreams(ctx); err != nil {
		return err
	}
	if err := b.alone(ctx); err != nil {
		return err
	}
	refusing := []string{"outbox_events", "outbox_messages_dlq", "outbox_journal", "outbox_deferred"}
	statements := append(truncate(refusing...),
		`SELECT pg_drop_replication_slot(slot_name)
			FROM pg_replication_slots WHERE database = current_database()`,
		`TRUNCATE public.outbox_messages`,
		`DELETE FROM public.outbox_known`, `DELETE FROM public.outbox_sent`,
		`DO $$
			DECLARE p name;
			BEGIN
				FOR p IN SELECT pubname FROM pg_publication LOOP
					EXECUTE format('DROP PUBLICATION %I', p);
				END LOOP;
			END $$`)
	for _, part := range set.parts() {
		if _, err := b.createStream(ctx, part); err != nil {
			return err
		}
		fit, err := b.Fit(part)
		if err != nil {
			return err
		}
		slot := fmt.Sprintf(`SELECT pg_create_logical_replication_slot('%s', 'pgoutput')`, part.Slot())
		statements = append(append(statements, fit...), slot)
	}
	some := 1
	if set.Of > 1 {
		some = 64 * set.Of // enough for every relay to have one
	}
	statements = append(statements, unsynced, fillSQL(set, some, some, b.Payload))
	if err := b.exec(ctx, statements...); err != nil {
		return err
	}
	if _, err := b.drain(ctx, set, some); err != nil {
		return err
	}
	return b.exec(ctx, unsynced, fillSQL(set, rows, b.PerTx, b.Payload), `CHECKPOINT`)
}

// alone waits until no session of a relay is left in the database. One that has ended may still be at work
// there: a statement of it could write after the tables were emptied, or deadlock with that.
func (b *bench) alone(ctx context.Context) error {
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for begun := time.Now(); ; {
		var others int
		if err := conn.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()
				AND application_name = 'walpost'`).Scan(&others); err != nil {
			return err
		}
		if others == 0 {
			return nil
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("%d sessions of a relay that has ended are still there", others)
		}
		if !sleep.For(ctx, 10*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
}

// createStream creates a relay's stream.
func (b *bench) createStream(ctx context.Context, set Setting) (jetstream.Stream, error) {
	s, err := b.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: set.Stream(), Subjects: []string{"walpost_bench" + set.suffix() + ".>"},
		Replicas: b.Replicas, Discard: jetstream.DiscardNew, AllowDirect: true,
		Duplicates:        b.DuplicateWindow(set.Batch),
		AllowBatchPublish: set.Batch == "fast", AllowAtomicPublish: set.Batch == "atomic",
	})
	if err != nil {
		return nil, hint.Errorf("leave out the batches that the server does not know: "+
			"fast ones need nats-server 2.14, atomic ones 2.12.1 (--batches single)",
			"create a stream for %s: %w", set, err)
	}
	return s, nil
}

// deleteStreams deletes every stream that a benchmark creates.
func (b *bench) deleteStreams(ctx context.Context) error {
	names := b.js.StreamNames(ctx)
	var all []string
	for name := range names.Name() {
		if name == Stream || strings.HasPrefix(name, Stream+"_") {
			all = append(all, name)
		}
	}
	if err := names.Err(); err != nil {
		return err
	}
	for _, name := range all {
		if err := b.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
	}
	return nil
}

// at is a stream and its last sequence at some time.
type at struct {
	jetstream.Stream
	last uint64
}

func (b *bench) ends(ctx context.Context, set Setting) (all []at, err error) {
	for _, part := range set.parts() {
		s, err := b.js.Stream(ctx, part.Stream())
		if err != nil {
			return nil, err
		}
		all = append(all, at{s, s.CachedInfo().State.LastSeq})
	}
	return all, nil
}

// drain starts the relays, each as a process, and waits until they have delivered the pending rows.
func (b *bench) drain(ctx context.Context, set Setting, rows int) (m Measurement, err error) {
	before, err := b.ends(ctx, set)
	if err != nil {
		return m, err
	}
	u, begun := b.usage(), time.Now()
	var relays []*process
	for _, part := range set.parts() {
		cmd, err := b.Command(part)
		if err != nil {
			return m, err
		}
		p, err := start(cmd)
		if err != nil {
			return m, err
		}
		defer p.kill()
		relays = append(relays, p)
	}
	for last, since := uint64(0), time.Now(); ; {
		n := uint64(0)
		for _, s := range before {
			info, err := s.Info(ctx)
			if err != nil {
				return m, err
			}
			n += info.State.LastSeq - s.last
		}
		if n >= uint64(rows) {
			break
		}
		if n > last {
			last, since = n, time.Now()
		}
		err := anyEnded(relays)
		if err == nil && time.Since(since) > patience {
			err = fmt.Errorf("none for %s", patience)
		}
		if err != nil {
			return m, fmt.Errorf("the relay has stored %d of %d rows and goes on no further: %w\n%s",
				n, rows, err, said(relays))
		}
		if !sleep.For(ctx, 20*time.Millisecond) {
			return m, context.Cause(ctx)
		}
	}
	stored := time.Now()
	hasEnded := func() error { return anyEnded(relays) }
	if err := b.settled(ctx, set.Mark, hasEnded); err != nil {
		return m, fmt.Errorf("%w\n%s", err, said(relays))
	}
	m.Rows, m.Whole = rows, time.Since(begun)
	marked := time.Since(stored)
	// The next relays take their rows from the slot.
	if err := b.none(ctx, unjoinedSQL, hasEnded); err != nil {
		return m, fmt.Errorf("%w\n%s", err, said(relays))
	}
	for _, p := range relays {
		if err := p.stop(); err != nil {
			return m, fmt.Errorf("stop the relay: %w\n%s", err, p.said())
		}
		m.Relay += p.cpu()
		m.RSS = max(m.RSS, p.peak)
	}
	m.Postgres, m.Broker = b.since(u)
	if m.Took, err = took(ctx, before, uint64(rows)); err == nil && len(before) == 1 && rows >= 10 {
		m.FirstTenth, m.LastTenth, err = tenths(ctx, before[0], uint64(rows))
	}
	m.Took += marked
	return m, err
}

func anyEnded(all []*process) error {
	for _, p := range all {
		if err := p.ended(); err != nil {
			return err
		}
	}
	return nil
}

func said(all []*process) string {
	var text []string
	for _, p := range all {
		text = append(text, p.said())
	}
	return strings.Join(text, "\n")
}

// tenths are the times that the first and the last tenth of n messages took.
func tenths(ctx context.Context, s at, n uint64) (first, last time.Duration, err error) {
	var times [4]time.Time
	for i, seq := range []uint64{1, n / 10, n - n/10 + 1, n} {
		msg, err := s.GetMsg(ctx, s.last+seq)
		if err != nil {
			return 0, 0, err
		}
		times[i] = msg.Time
	}
	return times[1].Sub(times[0]), times[3].Sub(times[2]), nil
}

// took is the time between the first and the last of n new messages, by the streams' timestamps.
func took(ctx context.Context, streams []at, n uint64) (time.Duration, error) {
	var first, last time.Time
	var found uint64
	for _, s := range streams {
		info, err := s.Info(ctx)
		if err != nil {
			return 0, err
		}
		if info.State.LastSeq == s.last {
			continue
		}
		found += info.State.LastSeq - s.last
		from, err := s.GetMsg(ctx, s.last+1)
		if err != nil {
			return 0, err
		}
		to, err := s.GetMsg(ctx, info.State.LastSeq)
		if err != nil {
			return 0, err
		}
		if first.IsZero() || from.Time.Before(first) {
			first = from.Time
		}
		if to.Time.After(last) {
			last = to.Time
		}
	}
	if found != n {
		return 0, fmt.Errorf("%d messages were stored, and not %d", found, n)
	}
	return last.Sub(first), nil
}
