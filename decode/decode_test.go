package decode_test

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// The functions below write pgoutput messages as the server does.

func msg(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case byte:
			b = append(b, p)
		case rune:
			b = append(b, byte(p))
		case uint16:
			b = binary.BigEndian.AppendUint16(b, p)
		case uint32:
			b = binary.BigEndian.AppendUint32(b, p)
		case uint64:
			b = binary.BigEndian.AppendUint64(b, p)
		case string: // with its zero
			b = append(append(b, p...), 0)
		case []byte:
			b = append(b, p...)
		default:
			panic(p)
		}
	}
	return b
}

const (
	commitAt  = outbox.LSN(0x16_B374D848)
	commitEnd = commitAt + 48
)

var commitTime = time.Date(2026, 11, 20, 10, 17, 35, 43443000, time.UTC)

func micros(t time.Time) uint64 {
	return uint64(t.Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).Microseconds())
}

func begin() []byte { return msg('B', uint64(commitAt), micros(commitTime), uint32(742)) }

func commit() []byte {
	return msg('C', byte(0), uint64(commitAt), uint64(commitEnd), micros(commitTime))
}

type col struct {
	name string
	typ  uint32
}

func relation(id uint32, schema, name string, columns ...col) []byte {
	b := msg('R', id, schema, name, 'd', uint16(len(columns)))
	for _, c := range columns {
		b = append(b, msg(byte(0), c.name, c.typ, uint32(0xFFFFFFFF))...)
	}
	return b
}

// tuple writes strings as text and nil as NULL; a rune is a bare kind.
func tuple(values ...any) []byte {
	b := msg(uint16(len(values)))
	for _, v := range values {
		switch v := v.(type) {
		case nil:
			b = append(b, 'n')
		case rune:
			b = append(b, byte(v))
		case string:
			b = append(b, msg('t', uint32(len(v)), []byte(v))...)
		default:
			panic(v)
		}
	}
	return b
}

func insert(id uint32, values ...any) []byte { return msg('I', id, 'N', tuple(values...)) }

const ours, foreign = 16385, 16400

func events() *outbox.Table {
	l, err := outbox.CustomLayout(map[string]string{
		"id": "id", "event_type": "type", "payload": "payload", "aggregate_id": "key",
	})
	if err != nil {
		panic(err)
	}
	return &outbox.Table{Schema: "public", Name: "events", Layout: l}
}

var eventColumns = []col{{"id", 20}, {"extra", 25}, {"type", 25}, {"key", 20}, {"payload", 3802}}

// opened is a decoder inside a transaction that knows its table and a foreign
// one.
func opened(t testing.TB, tables ...*outbox.Table) *decode.Decoder {
	t.Helper()
	if tables == nil {
		tables = []*outbox.Table{events()}
	}
	d := decode.New(tables, nil)
	feed(t, d, begin(), relation(ours, "public", "events", eventColumns...), relation(foreign, "public", "other", col{"a", 23}))
	return d
}

// feed decodes messages that must succeed and returns the last one's answer.
func feed(t testing.TB, d *decode.Decoder, messages ...[]byte) decode.Message {
	t.Helper()
	var last decode.Message
	for _, m := range messages {
		var err error
		if last, err = d.Decode(m); err != nil {
			t.Fatalf("decode %q: %v", m, err)
		}
	}
	return last
}
