package decode_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

func BenchmarkInsert(b *testing.B) {
	d := decode.New([]*outbox.Table{{Schema: "public", Name: "outbox_messages", Layout: outbox.Debezium()}}, nil)
	columns := []col{
		{"id", 20}, {"tenant_id", 20}, {"aggregatetype", 25}, {"aggregateid", 20}, {"type", 25}, {"payload", 3802}, {"occurred_at", 1184},
	}
	feed(b, d, begin(), relation(ours, "public", "outbox_messages", columns...))
	row := insert(ours, "4711", "17", "order", "815", "order.created", `{"k": "`+strings.Repeat("x", 280)+`"}`, "2026-11-20 10:17:35.043443+00")
	b.SetBytes(int64(len(row)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(row); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkForeignInsert(b *testing.B) {
	d := opened(b)
	row := insert(foreign, strings.Repeat("x", 400))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(row); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTransaction(b *testing.B) {
	d := opened(b)
	feed(b, d, commit())
	messages := [][]byte{begin(), insert(ours, "1", nil, "order.created", "7", `{"k": "v"}`), commit()}
	b.ReportAllocs()
	for b.Loop() {
		for _, m := range messages {
			if _, err := d.Decode(m); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func BenchmarkHash(b *testing.B) {
	d := opened(b)
	m := feed(b, d, insert(ours, "1", nil, "order.created", "7", `{"k": "`+strings.Repeat("x", 280)+`"}`))
	b.ReportAllocs()
	for b.Loop() {
		m.Event.Hash()
	}
}
