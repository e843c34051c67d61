package bench

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	nameSource = "source: pg_recvlogical to nothing"
	nameBinary = "source: pg_recvlogical to nothing, binary tuples"
	nameSink   = "sink: plain asynchronous publishing"
)

// sources measures how fast the server sends the rows to a reader that does nothing.
func (b *bench) sources(ctx context.Context) error {
	err := b.source(ctx, nameSource)
	if err == nil && b.Binary {
		err = b.source(ctx, nameBinary, "-o", "binary=true")
	}
	return err
}

func (b *bench) source(ctx context.Context, name string, options ...string) error {
	program := b.recvlogical()
	if program == "" {
		b.report.note("pg_recvlogical is neither on the PATH nor beside the server: the source's limit was not measured")
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
	u := b.usage()
	begun := time.Now()
	p, err := start(exec.CommandContext(ctx, program, append([]string{
		"-d", b.url, "--slot", copied, "--start", "--no-loop", "--endpos", end,
		"-o", "proto_version=1", "-o", "publication_names=" + Slot, "-f", "-", "-F", "0",
	}, options...)...))
	if err != nil {
		return err
	}
	<-p.done
	took := time.Since(begun)
	if p.err != nil {
		return fmt.Errorf("pg_recvlogical: %w: %s", p.err, p.said())
	}
	m := Measurement{Rows: b.Rows, Took: took, Relay: p.cpu()}
	m.Postgres, _ = b.since(u)
	b.report.add(name, m)
	_, err = conn.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, copied)
	return err
}

func (b *bench) recvlogical() string {
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", b.postgres)); err == nil && b.postgres > 0 {
		if program := filepath.Join(filepath.Dir(exe), "pg_recvlogical"); exec.Command(program, "--version").Run() == nil {
			return program
		}
	}
	program, _ := exec.LookPath("pg_recvlogical")
	return program
}

// sink measures how fast JetStream takes the same messages from a client that does
// nothing else: the newest that the relay has stored, again and again, each with an
// id of its own.
func (b *bench) sink(ctx context.Context, stream string) error {
	b.Say("%s", nameSink)
	s, err := b.js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	last, err := s.GetMsg(ctx, s.CachedInfo().State.LastSeq)
	if err != nil {
		return err
	}
	js, err := jetstream.New(b.NATS, jetstream.WithPublishAsyncMaxPending(4096))
	if err != nil {
		return err
	}
	from := s.CachedInfo().State.LastSeq
	for name := range last.Header { // those of the answer, and the relay's expectations
		if strings.HasPrefix(name, "Nats-") {
			delete(last.Header, name)
		}
	}
	u := b.usage()
	for i := range b.Rows {
		m := nats.NewMsg(last.Subject)
		maps.Copy(m.Header, last.Header)
		m.Header[nats.MsgIdHdr] = []string{"sink/" + strconv.FormatInt(time.Now().UnixNano(), 36) + "/" + strconv.Itoa(i)}
		m.Data = last.Data
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(time.Minute)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	m := Measurement{Rows: b.Rows}
	_, m.Broker = b.since(u)
	if m.Took, err = took(ctx, []at{{s, from}}); err != nil {
		return err
	}
	b.report.add(nameSink, m)
	return nil
}
