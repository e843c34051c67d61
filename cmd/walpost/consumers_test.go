package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// TestConsumersCommands looks at a consumer that runs, retries what it failed at, and rewinds it.
func TestConsumersCommands(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	o := newOffice(t, testenv.SharedPostgres(t), n, "{}")
	if got := o.says("consumers", "list"); !strings.Contains(got, "has no tables of consumers\nhint: make them with `walpost migrate up --only consumer`") {
		t.Errorf("before the tables are there: %s", got)
	}
	o.walpost("migrate", "up", "--only", "consumer")
	if got := o.walpost("consumers", "list"); !strings.HasSuffix(got, "0 consumers\n") {
		t.Errorf("before a consumer is there: %s", got)
	}
	o.exec(`CREATE TABLE effects (id TEXT)`)
	var healed atomic.Bool
	stop := o.consume(&healed)
	defer stop()
	for id := 1; id <= 20; id++ {
		m := nats.NewMsg(o.stream.Name + ".soon.made")
		m.Header = nats.Header{
			"ce-id": {fmt.Sprint(id)}, "ce-source": {"test"}, "ce-type": {"order.made"}, "ce-aggregatetype": {"order"},
			"ce-aggregateid": {fmt.Sprint(id % 2)},
		}
		m.Data = []byte(`{"id":` + fmt.Sprint(id) + `}`)
		_, err := o.js.PublishMsg(t.Context(), m)
		o.must(err)
	}
	effects := func(want string) {
		t.Helper()
		o.eventually(want+" effects", func() bool { return o.text(`SELECT count(*) FROM effects`) == want })
	}
	effects("19")
	o.eventually("positions move", func() bool { return o.text(`SELECT min(last_processed_id) FROM consumer_offsets`) == "20" })

	o.prints("consumers", "list")(`(?m)^billing +`+o.stream.Name+` +1 +3 +3 +20 +0 +0 +1$`, `(?m)^1 consumer$`)
	o.prints("consumers", "list", "billing")(`(?m)^filters +every subject$`, `(?m)^2 +20 +0 +\ds ago +1 +127.0.0.1 pid \d+$`)
	o.prints("consumers", "list", "--json")(`"consumer":"billing"`, `"stream_last_sequence":20`, `"dead_letters":1`)
	o.prints("consumers", "dlq", "list")(`(?m)^1 +billing +3 +order.made +3 +2 +\ds +dead letter +not now$`, `(?m)^1 event$`)
	o.prints("consumers", "dlq", "list", "--json", "--dead")(`"event_type":"order.made","attempts":2`)
	o.prints("consumers", "dlq", "show", "1")(`(?m)^aggregate +order/1$`, `(?m)^state +dead letter$`, `"id": 3`)
	o.prints("consumers", "dlq", "show", "1", "--json")(`"Payload":"eyJpZCI6M30="`)

	healed.Store(true)
	o.prints("consumers", "dlq", "retry", "1")(`^retried 1 event\n$`)
	effects("20")
	o.prints("consumers", "dlq", "list", "--consumer", "billing")(`(?m)^0 events$`)
	o.prints("consumers", "rewind", "billing", "--to", "11")(`^rewound 3 partitions to sequence 11: events that were handled are skipped \(--reapply handles them again\)\n$`)
	o.eventually("positions move", func() bool { return o.text(`SELECT min(last_processed_id) FROM consumer_offsets`) == "20" })
	effects("20")
	o.prints("consumers", "rewind", "billing", "--to", "11", "--reapply")(`^rewound 3 partitions to sequence 11: 10 events that had been handled will be handled again\n$`)
	effects("30")
	o.prints("consumers", "rewind", "billing", "--since", "1h", "--reapply")(`^rewound 3 partitions to sequence 1: 20 events that had been handled`)
	effects("50")

	for _, bad := range []struct{ args, want string }{
		{"consumers rewind billing", "hint: as in --to 4711 or --since 2h"},
		{"consumers rewind billing --to 99 --reapply", "the stream ends at 20"},
		{"consumers rewind billing --to 18446744073709551615", "the stream ends at 20"},
		{"consumers rewind nobody --to 1", "there is no consumer \"nobody\""},
		{"consumers list nobody", "hint: `walpost consumers list` shows"},
		{"consumers list --schema nowhere", "or name the database and the --schema"},
		{"consumers dlq retry", "hint: give numbers"},
		{"consumers dlq retry 7", "1 event not found"},
		{"consumers dlq retry x", "is no number"},
		{"consumers dlq show 7", "there is no parked event 7"},
		{"consumers dlq discard", "hint: give numbers"},
	} {
		if got := o.says(strings.Fields(bad.args)...); !strings.Contains(got, bad.want) || !strings.Contains(got, "hint: ") {
			t.Errorf("walpost %s says\n%s\nand not %q", bad.args, got, bad.want)
		}
	}
	stop()
	o.prints("consumers", "list")(`(?m)^billing +` + o.stream.Name + ` +0 +3 +0 +20 +0 +0 +0$`)
}

// consume handles events, all but the third.
func (o *office) consume(healed *atomic.Bool) (stop func()) {
	o.t.Helper()
	pool, err := pgxpool.New(o.t.Context(), o.conn.Config().ConnString())
	o.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- consume.Run(ctx, consume.Config{
			Name: "billing", Pool: pool, NATS: o.js.Conn(), Stream: o.stream.Name, Start: "all", Partitions: 3,
			MaxAttempts: 2, Backoff: time.Millisecond, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		}, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
			if e.ID == "3" && !healed.Load() {
				return errors.New("not now")
			}
			_, err := tx.Exec(ctx, `INSERT INTO effects (id) VALUES ($1)`, e.ID)
			return err
		})
		close(done)
	}()
	return func() {
		cancel()
		if err := <-done; err != nil {
			o.t.Errorf("%v (hint: %s)", err, hint.Of(err))
		}
		pool.Close()
	}
}

// prints runs a command, and checks its output by regular expressions.
func (o *office) prints(args ...string) func(patterns ...string) {
	o.t.Helper()
	got := o.walpost(args...)
	return func(patterns ...string) {
		o.t.Helper()
		for _, p := range patterns {
			if !regexp.MustCompile(p).MatchString(got) {
				o.t.Errorf("walpost %s prints\n%s\nwant %s", strings.Join(args, " "), got, p)
			}
		}
	}
}

// says runs a command that is to fail, and returns what it says.
func (o *office) says(args ...string) string {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	if code := execute(o.t.Context(), append(args, "--config", o.config), &stdout, &stderr); code == 0 {
		o.t.Errorf("walpost %s succeeds: %s", strings.Join(args, " "), &stdout)
	}
	return stderr.String()
}
