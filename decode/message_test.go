package decode_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

func TestTransaction(t *testing.T) {
	d := decode.New([]*outbox.Table{events()}, nil)
	m := feed(t, d, begin())
	want := decode.Message{Kind: decode.Begin, Commit: commitAt, CommitTime: commitTime, XID: 742}
	if m != want {
		t.Errorf("begin\n got %+v\nwant %+v", m, want)
	}
	m = feed(t, d, relation(ours, "public", "events", eventColumns...))
	if m != (decode.Message{Kind: decode.Described}) {
		t.Errorf("relation is %+v", m)
	}
	m = feed(t, d, insert(ours, "7", "ignored", "order.created", nil, `{}`))
	if m.Kind != decode.Row || m.Event == nil {
		t.Fatalf("insert is %+v, want a row", m)
	}
	e := m.Event
	if e.Table.String() != "public.events" || e.XID != 742 || e.Commit != commitAt || !e.CommitTime.Equal(commitTime) || e.N != 1 {
		t.Errorf("event %+v", e)
	}
	wantValues(t, e, map[outbox.Field]string{outbox.ID: "7", outbox.EventType: "order.created", outbox.Payload: "{}"})
	m = feed(t, d, commit())
	want = decode.Message{Kind: decode.Commit, Commit: commitAt, End: commitEnd, CommitTime: commitTime, XID: 742}
	if m != want {
		t.Errorf("commit\n got %+v\nwant %+v", m, want)
	}
}

// wantValues compares all values; a field that is not in want must be nil.
func wantValues(t *testing.T, e *outbox.Event, want map[outbox.Field]string) {
	t.Helper()
	for f := range outbox.NumFields {
		w, ok := want[f]
		switch v := e.Values[f]; {
		case !ok && v != nil:
			t.Errorf("%s is %q, want nil", f, v)
		case ok && v == nil:
			t.Errorf("%s is nil, want %q", f, w)
		case ok && string(v) != w:
			t.Errorf("%s is %q, want %q", f, v, w)
		}
	}
}

// An empty string is present; NULL is not. A row leaves nothing to the next.
func TestNullAndEmpty(t *testing.T) {
	d := opened(t)
	feed(t, d, insert(ours, "1", "x", "a.b", "7", `{}`))
	m := feed(t, d, insert(ours, "2", nil, "", nil, nil))
	wantValues(t, m.Event, map[outbox.Field]string{outbox.ID: "2", outbox.EventType: ""})
}

func TestValuesAliasTheMessage(t *testing.T) {
	d := opened(t)
	b := insert(ours, "1", nil, "order.created", "7", `{}`)
	e := feed(t, d, b).Event
	copy(b[strings.Index(string(b), "order"):], "ORDER")
	if got := string(e.Values[outbox.EventType]); got != "ORDER.created" {
		t.Errorf("event type %q does not alias the message", got)
	}
	if v := e.Values[outbox.EventType]; cap(v) != len(v) {
		t.Error("an append to a value would write into the next one")
	}
}

// N counts every INSERT of the transaction, whatever its table, and nothing
// else.
func TestOrdinal(t *testing.T) {
	d := opened(t)
	row := insert(ours, "1", nil, "a", nil, `{}`)
	for i, step := range []struct {
		before [][]byte
		want   uint32
	}{
		{nil, 1},
		{nil, 2},
		{[][]byte{insert(foreign, "1"), insert(foreign, nil)}, 5},
		{[][]byte{msg('U', uint32(foreign), 'N', tuple("1")), msg('D', uint32(foreign), 'K', tuple("1"))}, 6},
		{[][]byte{relation(ours, "public", "events", eventColumns...)}, 7},
		{[][]byte{commit(), begin()}, 1},
	} {
		if m := feed(t, d, append(step.before, row)...); m.Event.N != step.want {
			t.Errorf("step %d: N is %d, want %d", i, m.Event.N, step.want)
		}
	}
}

func TestOtherMessages(t *testing.T) {
	row := tuple("1", nil, 'u', "12")
	for name, m := range map[string][]byte{
		"foreign insert":   insert(foreign, "1"),
		"foreign TOAST":    insert(foreign, 'u'),
		"update":           msg('U', uint32(ours), 'N', row),
		"update with key":  msg('U', uint32(ours), 'K', row, 'N', row),
		"update with old":  msg('U', uint32(ours), 'O', row, 'N', row),
		"delete by key":    msg('D', uint32(ours), 'K', row),
		"delete with old":  msg('D', uint32(ours), 'O', row),
		"truncate":         msg('T', uint32(2), byte(3), uint32(ours), uint32(foreign)),
		"truncate of none": msg('T', uint32(0), byte(0)),
		"origin":           msg('O', uint64(9), "node"),
		"type":             msg('Y', uint32(9), "public", "mood"),
		"message":          msg('M', byte(1), uint64(9), "prefix", uint32(3), []byte("abc")),
		"foreign relation": relation(9, "public", "other", col{"a", 23}),
		"system relation":  relation(9, "", "events", col{"a", 23}),
		"same name":        relation(9, "other", "events", col{"a", 23}),
		"columnless":       relation(9, "public", "other"),
	} {
		t.Run(name, func(t *testing.T) {
			if got := feed(t, opened(t), m); got != (decode.Message{}) {
				t.Errorf("got %+v, want nothing", got)
			}
		})
	}
	if got := feed(t, opened(t), relation(9, "public", "events", col{"a", 23})); got != (decode.Message{Kind: decode.Described, Altered: true}) {
		t.Errorf("another description of our table is %+v", got)
	}
}

// Some messages may come outside a transaction.
func TestOutsideTransaction(t *testing.T) {
	feed(t, decode.New(nil, nil),
		msg('M', byte(0), uint64(9), "prefix", uint32(3), []byte("abc")),
		relation(9, "public", "other", col{"a", 23}),
		msg('Y', uint32(9), "public", "mood"),
		msg('O', uint64(9), "node"))
}

func TestErrors(t *testing.T) {
	row := tuple("1")
	five := []any{"1", nil, "a", nil, "{}"}
	for name, c := range map[string]struct {
		m    []byte
		want string
	}{
		"empty":                {nil, "no bytes"},
		"nested begin":         {begin(), "inside the transaction that commits at 16/B374D848"},
		"commit elsewhere":     {msg('C', byte(0), uint64(7), uint64(8), uint64(0)), "commit at 16/B374D848"},
		"commit flags":         {msg('C', byte(1), uint64(commitAt), uint64(commitEnd), uint64(0)), "unknown flags 0x1"},
		"commit without end":   {msg('C', byte(0), uint64(commitAt), uint64(commitAt), uint64(0)), "ends at"},
		"unknown relation":     {insert(7, "1"), "relation 7 was never described"},
		"tuple kind":           {msg('I', uint32(ours), 'K', row), `tuple kind 'K'`},
		"too few columns":      {insert(ours, "1"), "table public.events: 1 columns, but 5 were described"},
		"too many columns":     {insert(ours, append(five, "6")...), "6 columns"},
		"unchanged TOAST":      {insert(ours, "1", nil, "a", nil, 'u'), `column "payload": unchanged TOAST value in an INSERT`},
		"TOAST, unmapped":      {insert(ours, "1", 'u', "a", nil, "{}"), "column 2: unchanged TOAST"},
		"value kind":           {insert(ours, "1", nil, 'x', nil, "{}"), `column "type": value kind 'x'`},
		"value too long":       {append(insert(ours, "1", nil, "a", nil), msg('t', uint32(3), []byte("{}"))...), "4 columns"},
		"negative length":      {msg('I', uint32(ours), 'N', uint16(5), 't', uint32(0xFFFFFFFF), byte(0)), "want 4294967295 bytes"},
		"foreign tail":         {append(insert(foreign, "1"), 0), "1 bytes after its end"},
		"binary value":         {msg('I', uint32(ours), 'N', uint16(5), 'b', uint32(1), byte(1)), `column "id": value kind 'b'`},
		"foreign binary value": {msg('I', uint32(foreign), 'N', uint16(1), 'b', uint32(1), byte(1)), `kind 'b'`},
		"foreign value kind":   {insert(foreign, 'x'), "kind 'x'"},
		"foreign length":       {msg('I', uint32(foreign), 'N', uint16(1), 't', uint32(0x80000000)), "want 2147483648 bytes"},
		"relation count":       {msg('R', uint32(1), "public", "t", 'd', uint16(0xFFFF), []byte("0123456789")), "65535 columns in 10 bytes"},
		"relation without end": {msg('R', uint32(1), []byte("public")), "terminating zero"},
		"truncate count":       {msg('T', uint32(0x40000000), byte(0)), "1073741824 relations in 0 bytes"},
		"update kind":          {msg('U', uint32(ours), 'X', row), `kind 'X'`},
		"delete kind":          {msg('D', uint32(ours), 'N', row), `kind 'N'`},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := opened(t).Decode(c.m)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			if m != (decode.Message{}) {
				t.Errorf("message %+v beside an error", m)
			}
		})
	}
}

func TestNeedsTransaction(t *testing.T) {
	d := opened(t)
	feed(t, d, commit())
	for name, m := range map[string][]byte{
		"insert":   insert(ours, "1", nil, "a", nil, "{}"),
		"foreign":  insert(foreign, "1"),
		"update":   msg('U', uint32(ours), 'N', tuple("1")),
		"delete":   msg('D', uint32(ours), 'K', tuple("1")),
		"truncate": msg('T', uint32(0), byte(0)),
		"commit":   commit(),
	} {
		if _, err := d.Decode(m); err == nil || !strings.Contains(err.Error(), "outside a transaction") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	feed(t, d, begin()) // what failed changed nothing
}

func TestOtherProtocols(t *testing.T) {
	for kind, version := range map[byte]int{
		'S': 2, 'E': 2, 'c': 2, 'A': 2, 'b': 3, 'P': 3, 'K': 3, 'r': 3, 'p': 3,
	} {
		_, err := decode.New(nil, nil).Decode([]byte{kind, 0, 0, 0, 0})
		if e, ok := errors.AsType[*decode.ProtocolError](err); !ok || e.Version != version || e.Type != kind ||
			!strings.HasSuffix(err.Error(), fmt.Sprintf("protocol %d was not asked for", version)) {
			t.Errorf("%q: error %v", kind, err)
		}
	}
	for i := range 256 {
		kind := byte(i)
		_, err := decode.New(nil, nil).Decode([]byte{kind})
		_, unknown := errors.AsType[*decode.UnknownMessageError](err)
		if known := strings.ContainsRune("BCORYIUDTMSEcAbPKrp", rune(kind)); unknown == known {
			t.Errorf("%q: error %v", kind, err)
		}
	}
}

// Every message cut short, and every message with a byte too many, is an error.
func TestFraming(t *testing.T) {
	row := tuple("1", nil, 'u', "12")
	for name, m := range map[string][]byte{
		"insert":   insert(ours, "1", "x", "a", nil, "{}"),
		"foreign":  insert(foreign, "1"),
		"relation": relation(9, "public", "events", eventColumns...),
		"other":    relation(9, "public", "other", eventColumns...),
		"update":   msg('U', uint32(ours), 'O', row, 'N', row),
		"delete":   msg('D', uint32(ours), 'K', row),
		"truncate": msg('T', uint32(1), byte(0), uint32(ours)),
		"origin":   msg('O', uint64(9), "node"),
		"type":     msg('Y', uint32(9), "public", "mood"),
		"message":  msg('M', byte(1), uint64(9), "prefix", uint32(3), []byte("abc")),
		"commit":   commit(),
	} {
		for n := range m {
			if _, err := opened(t).Decode(m[:n:n]); err == nil {
				t.Errorf("%s cut to %d of %d bytes is no error", name, n, len(m))
			}
		}
		if _, err := opened(t).Decode(append(m[:len(m):len(m)], 0)); err == nil {
			t.Errorf("%s with a byte too many is no error", name)
		}
		feed(t, opened(t), m)
	}
	b := begin()
	for n := range b {
		if _, err := decode.New(nil, nil).Decode(b[:n:n]); err == nil {
			t.Errorf("begin cut to %d bytes is no error", n)
		}
	}
	if _, err := decode.New(nil, nil).Decode(append(b, 0)); err == nil {
		t.Error("begin with a byte too many is no error")
	}
}

func TestInsertDoesNotAllocate(t *testing.T) {
	d := opened(t)
	messages := [][]byte{
		insert(ours, "1", nil, "order.created", "7", `{}`),
		insert(foreign, "1"),
		commit(),
		begin(),
	}
	n := testing.AllocsPerRun(100, func() {
		for _, m := range messages {
			if _, err := d.Decode(m); err != nil {
				t.Fatal(err)
			}
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
