package decode_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// A recording is a gzip file of messages, each behind its length in four
// bytes.

func writeRecording(path string, messages [][]byte) error {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(join(messages)); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

func readRecording(t testing.TB, path string) [][]byte {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	r, err := gzip.NewReader(f)
	check(t, err)
	b, err := io.ReadAll(r)
	check(t, err)
	messages, rest := split(b)
	if len(rest) != 0 || len(messages) == 0 {
		t.Fatalf("%s: %d messages and %d bytes that are none", path, len(messages), len(rest))
	}
	return messages
}

func join(messages [][]byte) []byte {
	var b []byte
	for _, m := range messages {
		b = binary.BigEndian.AppendUint32(b, uint32(len(m)))
		b = append(b, m...)
	}
	return b
}

// split cuts messages whose capacity is their length: a read past the end
// cannot go unseen.
func split(b []byte) (messages [][]byte, rest []byte) {
	for len(b) >= 4 {
		n := int(binary.BigEndian.Uint32(b))
		if n > len(b)-4 {
			break
		}
		messages = append(messages, b[4:4+n:4+n])
		b = b[4+n:]
	}
	return messages, b
}

// recordings are the files that match; none is a failure.
func recordings(t testing.TB, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", pattern))
	check(t, err)
	if len(paths) == 0 {
		t.Fatalf("no recording matches %s", pattern)
	}
	return paths
}

// recordedTables are those of testdata/scenario.sql.
func recordedTables() []*outbox.Table {
	var e, p outbox.Layout
	e.Columns = [outbox.NumFields]string{
		outbox.ID: "id", outbox.TenantID: "tenant", outbox.AggregateType: "kind", outbox.AggregateID: "key",
		outbox.AggregateVersion: "version", outbox.EventType: "type", outbox.EventVersion: "flag",
		outbox.Payload: "body", outbox.OccurredAt: "at", outbox.TraceID: "trace", outbox.AvailableAt: "local",
		outbox.ProcessedAt: "day", outbox.Attempts: "score", outbox.LastError: "code",
	}
	p.Columns[outbox.ID], p.Columns[outbox.EventType], p.Columns[outbox.Payload] = "id", "type", "body"
	return []*outbox.Table{{Schema: "public", Name: "events", Layout: e}, {Schema: "public", Name: "parts", Layout: p}}
}

func TestRecordings(t *testing.T) {
	for _, path := range recordings(t, "pg*.gz") {
		t.Run(filepath.Base(path), func(t *testing.T) {
			base, _, _ := strings.Cut(path, "-")
			want, err := os.ReadFile(base + ".txt")
			check(t, err)
			diff(t, path, render(readRecording(t, path)), string(want))
		})
	}
}

// render decodes a session and writes a line for every message.
func render(messages [][]byte) string {
	d := decode.New(recordedTables(), nil)
	var b strings.Builder
	for _, data := range messages {
		m, err := d.Decode(data)
		if err != nil {
			fmt.Fprintf(&b, "error %v\n", err)
			continue
		}
		switch m.Kind {
		case decode.Begin:
			fmt.Fprintf(&b, "begin %s %s xid %d\n", m.Commit, m.CommitTime.Format(time.RFC3339Nano), m.XID)
		case decode.Commit:
			fmt.Fprintf(&b, "commit %s end %s %s xid %d\n", m.Commit, m.End, m.CommitTime.Format(time.RFC3339Nano), m.XID)
		case decode.Row:
			fmt.Fprintf(&b, "row %s\n", renderEvent(m.Event))
		default:
			fmt.Fprintf(&b, "other %c\n", data[0])
		}
	}
	return b.String()
}

func renderEvent(e *outbox.Event) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s n %d xid %d hash %016x", e.Table, e.Commit, e.N, e.XID, e.Hash())
	for f, v := range e.Values {
		switch {
		case v == nil:
		case len(v) > 80:
			fmt.Fprintf(&b, " %s=%d bytes, SHA-256 %x", outbox.Field(f), len(v), sha256.Sum256(v))
		default:
			fmt.Fprintf(&b, " %s=%q", outbox.Field(f), v)
		}
	}
	return b.String()
}

// diff reports the first lines that differ.
func diff(t *testing.T, name, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("%s: line %d is\n%s\nwant\n%s", name, i+1, g[i], w[i])
		}
	}
	t.Fatalf("%s: %d lines, want %d", name, len(g), len(w))
}
