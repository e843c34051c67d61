package bench

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	nameSource = "source: pg_recvlogical to nothing"
	nameBinary = "source: pg_recvlogical to nothing, binary tuples"
)

// sources measures how fast the server sends the rows to a reader that drops them.
func (b *bench) sources(ctx context.Context, run int) error {
	all := []func() error{func() error { return b.source(ctx, nameSource) }}
	if b.Binary {
		all = append(all, func() error { return b.source(ctx, nameBinary, "-o", "binary=true") })
	}
	return inTurn(all, run)
}

func (b *bench) source(ctx context.Context, name string, options ...string) error {
	program := b.recvlogical()
	if program == "" {
		b.report.note("pg_recvlogical is neither on the PATH nor beside the server: " +
			"the source was not measured")
		return nil
	}
	b.Say("%s", name)
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	const copied = Slot + "_copy"
	var end string
	err = conn.QueryRow(ctx, `SELECT pg_copy_logical_replication_slot($1, $2)::text`, Slot, copied).Scan(&end)
	if err == nil {
		err = conn.QueryRow(ctx, `SELECT pg_current_wal_flush_lsn()::text`).Scan(&end)
	}
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, append([]string{
		"-d", withoutPassword(b.url), "--slot", copied, "--start", "--no-loop", "--endpos", end,
		"-o", "proto_version=1", "-o", "publication_names=" + Slot, "-f", "-", "-F", "0",
	}, options...)...)
	cmd.Env = os.Environ()
	if password := conn.Config().Password; password != "" {
		cmd.Env = append(cmd.Env, "PGPASSWORD="+password)
	}
	u := b.usage()
	begun := time.Now()
	p, err := start(cmd)
	if err != nil {
		return err
	}
	<-p.done
	took := time.Since(begun)
	if p.err != nil {
		return fmt.Errorf("pg_recvlogical: %w: %s", p.err, p.said())
	}
	m := Measurement{Rows: b.Rows, Took: took, Whole: took, Relay: p.cpu()}
	m.Postgres, _ = b.since(u)
	b.report.add(name, m)
	_, err = conn.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, copied)
	return err
}

var passwordKeyword = regexp.MustCompile(`(?i)\bpassword\s*=\s*('(?:[^'\\]|\\.)*'|\S+)`)

// withoutPassword is the connection string for a command line, which every user of the machine can read.
func withoutPassword(conn string) string {
	u, err := url.Parse(conn)
	if err != nil || !strings.Contains(conn, "://") {
		return passwordKeyword.ReplaceAllString(conn, "")
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	q := u.Query()
	q.Del("password")
	u.RawQuery = q.Encode()
	return u.String()
}

func (b *bench) recvlogical() string {
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", b.postgres)); err == nil && b.postgres > 0 {
		program := filepath.Join(filepath.Dir(exe), "pg_recvlogical")
		if exec.Command(program, "--version").Run() == nil {
			return program
		}
	}
	program, _ := exec.LookPath("pg_recvlogical")
	return program
}

const (
	// sinkPending and sinkBytes bound the messages in flight to the sink, as publish.window and
	// publish.window_bytes do for the relay.
	sinkPending = 4096
	sinkBytes   = 32 << 20
)

// sinks measures how fast JetStream stores such messages from a client that does nothing else: from walpost's
// publisher with each kind of batches, and from nats.go with each duplicate window. The latter repeats the
// newest message that a relay has stored.
func (b *bench) sinks(ctx context.Context, set Setting, run int) error {
	var windows []time.Duration
	for _, batch := range b.Batches {
		if w := b.DuplicateWindow(batch); !slices.Contains(windows, w) {
			windows = append(windows, w)
		}
	}
	s, err := b.js.Stream(ctx, set.parts()[0].Stream())
	if err != nil {
		return err
	}
	last, err := s.GetMsg(ctx, s.CachedInfo().State.LastSeq)
	if err != nil {
		return err
	}
	for name := range last.Header { // set by the server's answer, or what the relay expected of the stream
		if strings.HasPrefix(name, "Nats-") {
			delete(last.Header, name)
		}
	}
	if err := b.deleteStreams(ctx); err != nil {
		return err
	}
	var all []func() error
	for _, batch := range b.Batches {
		all = append(all, func() error { return b.ownSink(ctx, Setting{Batch: batch}) })
	}
	for _, w := range windows {
		all = append(all, func() error {
			return b.sink(ctx, &nats.Msg{Subject: last.Subject, Header: last.Header, Data: last.Data}, w)
		})
	}
	return inTurn(all, run)
}

// inTurn calls each, in reverse order in every other run: the first place may be a better or a worse one.
func inTurn(all []func() error, run int) error {
	if run%2 == 1 {
		slices.Reverse(all)
	}
	for _, do := range all {
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// ownSink measures the publisher without a relay. That bounds a relay's rate: a stream stores one message
// after the other, however many processors there are.
func (b *bench) ownSink(ctx context.Context, set Setting) error {
	name := "sink: walpost's publishing alone" + set.batches()
	b.Say("%s", name)
	s, err := b.createStream(ctx, set)
	if err != nil {
		return err
	}
	payload := fmt.Sprintf(`{"n": %d, "pad": "%s"}`, b.Rows, pad(b.Payload))
	begun := b.begin()
	if err := b.Publish(ctx, set, event, payload, b.Rows, b.PerTx); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return b.addSink(ctx, name, s, begun)
}

func (b *bench) sink(ctx context.Context, like *nats.Msg, window time.Duration) error {
	name := fmt.Sprintf("sink: plain asynchronous publishing, duplicate window %s", window)
	b.Say("%s", name)
	s, err := b.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: Stream, Subjects: []string{like.Subject}, Replicas: b.Replicas,
		Discard: jetstream.DiscardNew, AllowDirect: true, Duplicates: window,
	})
	if err != nil {
		return err
	}
	pending := max(1, min(sinkPending, sinkBytes/like.Size()))
	js, err := b.jetStream(jetstream.WithPublishAsyncMaxPending(pending))
	if err != nil {
		return err
	}
	begun := b.begin()
	for i := range b.Rows {
		m := nats.NewMsg(like.Subject)
		maps.Copy(m.Header, like.Header)
		m.Header[nats.MsgIdHdr] = []string{"sink/" + strconv.Itoa(i)}
		m.Data = like.Data
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(time.Minute)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return b.addSink(ctx, name, s, begun)
}

// beginning holds the clocks when a sink begins: the servers' CPU time, this process's, and the time.
type beginning struct {
	servers usage
	own     time.Duration
	at      time.Time
}

func (b *bench) begin() beginning { return beginning{b.usage(), ownCPU(), time.Now()} }

// addSink adds the measurement of a sink to the report.
func (b *bench) addSink(ctx context.Context, name string, s jetstream.Stream, begun beginning) (err error) {
	m := Measurement{Rows: b.Rows, Whole: time.Since(begun.at), Relay: ownCPU() - begun.own}
	_, m.Broker = b.since(begun.servers)
	if m.Took, err = took(ctx, []at{{s, 0}}, uint64(b.Rows)); err != nil {
		return err
	}
	b.report.add(name, m)
	return b.deleteStreams(ctx)
}
