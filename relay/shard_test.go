package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/stream"
	"github.com/walpost/walpost/verify"
)

// TestShards: relays share the aggregates of one outbox. Each delivers its own, whether
// the WAL or the table brings them, whatever fails or is late, and touches no other's.
func TestShards(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		if pg.Version() >= 15 { // publications filter no rows before
			testShards(newRig(t, pg), relay.ModeAuto)
		}
	})
	t.Run("poll mode", func(t *testing.T) {
		t.Parallel()
		testShards(newRig(t, testenv.SharedPostgres(t)), relay.ModePoll)
	})
}

func testShards(r *rig, mode relay.Mode) {
	const of, rows = 3, 600
	r.exec(`ALTER TABLE outbox_messages ALTER aggregate_id DROP NOT NULL`)
	// On every version, or a relay would have other rows after an upgrade.
	if got := r.query1(`SELECT concat_ws(' ', hash_record_extended(ROW(1::bigint), 0), hash_record_extended(ROW('abc'::text), 0))`); got != "-3670598878359251130 -6747756470228489321" {
		r.t.Errorf("the hashes are %s", got)
	}
	r.cfg.Mode, r.cfg.FallbackInterval = mode, 200*time.Millisecond
	r.cfg.Retry = table.Retry{Backoff: 50 * time.Millisecond, MaxAttempts: 2}
	shards := make([]*rig, of)
	for i := range shards {
		shards[i] = r.shard(i+1, of)
	}
	fill := func(from, to int) {
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
			SELECT 'order', CASE WHEN n % 11 = 0 THEN NULL ELSE n % 20 END, CASE WHEN n % 150 = 7 THEN 'not a subject' ELSE 'order.placed' END,
				jsonb_build_object('n', n), CASE WHEN n % 22 = 0 THEN now() + interval '3 s' ELSE now() END
			FROM generate_series($1::int, $2::int) n ORDER BY n`, from, to)
	}
	fill(1, rows/3) // before any has ever been there
	var running []*running
	for _, s := range shards {
		running = append(running, s.startAtWork())
	}
	fill(rows/3+1, rows*2/3)
	for i := range running {
		running[i].halt()
	}
	fill(rows*2/3+1, rows) // while none is there
	for i, s := range shards {
		running[i] = s.startAtWork()
	}
	eventually(r.t, "everything is delivered, or a dead letter", func() bool {
		return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == 0
	})
	dead := r.count(`SELECT count(*) FROM outbox_messages_dlq`)
	at, last, total := map[string]int{}, map[string]int{}, 0
	for i, s := range shards {
		messages := readStream(r.t, r.nats.URL(), s.cfg.Stream.Name)
		if len(messages) < rows/of/3 {
			r.t.Errorf("shard %d has %d messages of %d", i+1, len(messages), rows)
		}
		total += len(messages)
		for _, m := range messages {
			id, n := m.Header.Get("ce-aggregateid"), 0
			if id == "" {
				continue
			}
			if at[id] != 0 && at[id] != i+1 {
				r.t.Errorf("aggregate %s is in shards %d and %d", id, at[id], i+1)
			}
			at[id] = i + 1
			if _, err := fmt.Sscanf(string(m.Data), `{"n": %d}`, &n); err != nil {
				r.t.Fatal(err)
			}
			if n <= last[id] {
				r.t.Errorf("number %d of aggregate %s stands behind %d", n, id, last[id])
			}
			last[id] = n
		}
		running[i].quiet("missed_rows", "events_lost", "nothing_to_compare", "rival", "foreign_message")
		s.finds(s.verify(func(c *verify.Config) {
			nc := s.js().Conn()
			stream, err := jetstream.NewStream(nc, s.cfg.Stream)
			r.must(err)
			c.Stream = stream
		}), nil)
	}
	joined := natsjs.StreamConfig{Name: "JOINED"}
	for _, s := range shards {
		joined.Sources = append(joined.Sources, &natsjs.StreamSource{
			Name:              s.cfg.Stream.Name,
			SubjectTransforms: []natsjs.SubjectTransformConfig{{Source: s.cfg.Stream.Pattern, Destination: "joined.>"}},
		})
	}
	_, err := r.js().CreateStream(r.t.Context(), joined)
	r.must(err)
	eventually(r.t, "the streams are joined", func() bool {
		s, err := r.js().Stream(r.t.Context(), "JOINED")
		return err == nil && s.CachedInfo().State.Msgs == uint64(total)
	})
	clear(last)
	for _, m := range readStream(r.t, r.nats.URL(), "JOINED") {
		n := 0
		_, _ = fmt.Sscanf(string(m.Data), `{"n": %d}`, &n)
		if id := m.Header.Get("ce-aggregateid"); id != "" {
			if n <= last[id] {
				r.t.Errorf("number %d of aggregate %s stands behind %d where the streams are joined", n, id, last[id])
			}
			last[id] = n
		}
		if m.Subject != "joined.order.placed" {
			r.t.Fatalf("subject %s", m.Subject)
		}
	}
	if dead == 0 || total+dead != rows {
		r.t.Errorf("%d messages and %d dead letters of %d rows", total, dead, rows)
	}
}

// shard is a relay of one part, with a slot, a publication and a stream of its own.
func (r *rig) shard(index, of int) *rig {
	s := *r
	box := *r.cfg.Outboxes[0]
	box.Shard = outbox.Shard{Index: index, Of: of}
	s.cfg.Outboxes = []*outbox.Table{&box}
	s.cfg.Slot += fmt.Sprintf("_%d", index)
	s.cfg.Publication += fmt.Sprintf("_%d", index)
	s.cfg.Subject = fmt.Sprintf("events.%d.{event_type}", index)
	s.cfg.Stream.Name += fmt.Sprintf("_%d", index)
	s.cfg.Stream.Pattern = fmt.Sprintf("events.%d.>", index)
	r.t.Cleanup(func() { r.dropSlot(s.cfg.Slot) })
	return &s
}

// TestShardOfAnotherPublication: a publication that does not filter as the shard wants is
// refused, with the statement that mends it.
func TestShardOfAnotherPublication(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	conn := r.conn()
	first, second := r.shard(1, 2), r.shard(2, 2)
	if _, err := stream.EnsurePublication(t.Context(), conn, first.cfg.Publication, first.cfg.Outboxes); err != nil {
		t.Fatal(err)
	}
	r.must(stream.CheckPublication(t.Context(), conn, first.cfg.Publication, first.cfg.Outboxes))
	for _, wrong := range []*rig{second, r} {
		err := stream.CheckPublication(t.Context(), conn, first.cfg.Publication, wrong.cfg.Outboxes)
		if err == nil || !strings.Contains(err.Error(), "public.outbox_messages") {
			t.Errorf("%v", err)
		}
	}
	_, err := r.conn().Exec(t.Context(), stream.PublicationSQL(r.cfg.Publication, r.cfg.Outboxes))
	r.must(err)
	if err := stream.CheckPublication(t.Context(), conn, r.cfg.Publication, second.cfg.Outboxes); err == nil || !strings.Contains(err.Error(), "all rows") {
		t.Errorf("a publication of everything: %v", err)
	}
}

// TestShardsShareNoStream: they have one source, and would take each other's messages for
// their own.
func TestShardsShareNoStream(t *testing.T) {
	box := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate, Shard: outbox.Shard{Index: 1, Of: 2}}
	cfg := relay.Config{Subject: "events.{event_type}", Outboxes: []*outbox.Table{box}, Stream: jetstream.StreamConfig{Name: "EVENTS", Shared: true}}
	if _, err := relay.New(cfg, zap.NewNop(), prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "shard 1/2") || hint.Of(err) == "" {
		t.Errorf("%v (%s)", err, hint.Of(err))
	}
}

// TestUnknownMarkIsRefused: a table without a known mark is an error of the configuration, with advice.
func TestUnknownMarkIsRefused(t *testing.T) {
	for _, mark := range []outbox.Mark{"", "archive"} {
		box := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: mark}
		cfg := relay.Config{Subject: "events.{event_type}", Outboxes: []*outbox.Table{box}}
		_, err := relay.New(cfg, zap.NewNop(), prometheus.NewRegistry())
		if err == nil || !strings.Contains(err.Error(), "unknown mark") || hint.Of(err) == "" {
			t.Errorf("mark %q: %v (%s)", mark, err, hint.Of(err))
		}
	}
}
