package outbox_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/outbox"
)

func canonicalTable() *outbox.Table {
	return &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical()}
}

func TestMessageID(t *testing.T) {
	r := outbox.Ref{Table: canonicalTable(), ID: "4711", Hash: 0xAB}
	const want = "orders-db/public.outbox_messages/4711/00000000000000ab"
	if got := r.MessageID("orders-db"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := "orders-db/" + r.String(); got != want {
		t.Errorf("the event id is %s", r)
	}
	m, ok := outbox.ParseMessageID("orders-db", want)
	if !ok || m != (outbox.MessageID{Table: "public.outbox_messages", ID: "4711", Hash: 0xAB}) {
		t.Errorf("parsed %+v, %t", m, ok)
	}
	m, ok = outbox.ParseMessageID("orders-db", want+"/replay-2")
	if !ok || m != (outbox.MessageID{Table: "public.outbox_messages", ID: "4711", Hash: 0xAB, Replay: true, Request: 2}) {
		t.Errorf("parsed %+v, %t", m, ok)
	}
}

// A source may hold slashes, as system id and database do.
func TestMessageIDOfSourceWithSlash(t *testing.T) {
	r := outbox.Ref{Table: canonicalTable(), ID: "1", Hash: 1}
	if _, ok := outbox.ParseMessageID("75/orders", r.MessageID("75/orders")); !ok {
		t.Error("not recognised")
	}
	for _, source := range []string{"75", "75/order", "", "75/orders/public.outbox_messages"} {
		if m, ok := outbox.ParseMessageID(source, r.MessageID("75/orders")); ok {
			t.Errorf("taken for one of source %q: %+v", source, m)
		}
	}
}

func TestParseMessageIDRefuses(t *testing.T) {
	for _, s := range []string{
		"", "s", "s/", "s/t/1", "s/t/1/00000000000000ab/x", "s/t/1/00000000000000ab/replay-1/x", "s/t/1/ab", "s/t/1/00000000000000xy",
		"s/t/1/000000000000000ab", "s/t/1/+0000000000000ab", "s/t/%/00000000000000ab", "s/t/%2/00000000000000ab", "s/t%zz/1/00000000000000ab",
		"x/t/1/00000000000000ab", "ss/t/1/00000000000000ab", "s/t/1/0x000000000000ab", "s/t/%+1/00000000000000ab", "s/t/1/0000000000000000",
		"s/t/" + strings.Repeat("1", outbox.MaxID+1) + "/00000000000000ab", "s/" + strings.Repeat("t", outbox.MaxID+1) + "/1/00000000000000ab",
	} {
		if m, ok := outbox.ParseMessageID("s", s); ok {
			t.Errorf("%q is taken for %+v", s, m)
		}
	}
}

// Whatever the row's id holds, the header is printable ASCII and tells two
// rows apart.
func FuzzParseMessageID(f *testing.F) {
	f.Add("public", "outbox_messages", "4711", "s/public.outbox_messages/4711/00000000000000ab")
	f.Add("a b", "ä/%\x7f", "\r\n\x00", "s/a.b/%0D/0123456789ABCDEF/replay-x")
	f.Fuzz(func(t *testing.T, schema, name, id, s string) {
		r := outbox.Ref{Table: &outbox.Table{Schema: schema, Name: name}, ID: id, Hash: uint64(len(s))<<56 | 1}
		text := r.MessageID("source/x")
		if strings.IndexFunc(text, func(c rune) bool { return c <= ' ' || c >= 0x7F }) >= 0 {
			t.Errorf("message id %q is no header value", text)
		}
		want := outbox.MessageID{Table: schema + "." + name, ID: id, Hash: r.Hash}
		short := len(id) <= outbox.MaxID && len(schema)+len(name) <= outbox.MaxID/3-1
		if got, ok := outbox.ParseMessageID("source/x", text); short && (!ok || got != want) {
			t.Errorf("%q is %+v, %t, want %+v", text, got, ok, want)
		}
		outbox.ParseMessageID("s", s)
	})
}
