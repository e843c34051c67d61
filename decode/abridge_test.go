package decode_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// abridged reads a message through Abridge, with at most so many bytes for a payload.
func abridged(t testing.TB, d *decode.Decoder, m []byte, payload int) []byte {
	t.Helper()
	r := bytes.NewReader(m)
	short, err := d.Abridge(nil, r, len(m), payload)
	check(t, err)
	if r.Len() != 0 {
		t.Fatalf("%d bytes of the message are left", r.Len())
	}
	return short
}

// Values that are too long leave their length behind, those that nobody wants nothing,
// and the others stay what they are.
func TestAbridge(t *testing.T) {
	d := opened(t)
	long := strings.Repeat("x", outbox.MostAttribute+1)
	row := func(values ...any) *outbox.Event {
		return feed(t, d, abridged(t, d, insert(ours, values...), 3)).Event
	}
	e := row("7", long, "order.created", nil, "1234")
	wantValues(t, e, map[outbox.Field]string{outbox.ID: "7", outbox.EventType: "order.created", outbox.Payload: ""})
	if want := []outbox.Omitted{{Field: outbox.Payload, Size: 4}}; !reflect.DeepEqual(e.Omitted, want) || e.Hash() != outbox.UnknownHash {
		t.Errorf("omitted %v with hash %x, want %v", e.Omitted, e.Hash(), want)
	}
	e = row("7", "x", long, long, long)
	wantValues(t, e, map[outbox.Field]string{outbox.ID: "7", outbox.EventType: "", outbox.AggregateID: "", outbox.Payload: ""})
	if len(e.Omitted) != 3 || e.Omitted[0] != (outbox.Omitted{Field: outbox.EventType, Size: len(long)}) {
		t.Errorf("omitted %v, want all three", e.Omitted)
	}
	e = row("8", long, long[1:], "9", "123")
	wantValues(t, e, map[outbox.Field]string{outbox.ID: "8", outbox.EventType: long[1:], outbox.AggregateID: "9", outbox.Payload: "123"})
	if e.Omitted != nil || e.N != 3 {
		t.Errorf("row %d: omitted %v, want nothing", e.N, e.Omitted)
	}
	for _, m := range [][]byte{
		insert(foreign, long), msg('U', uint32(ours), 'O', tuple("1", nil, 'u', "12", long), 'N', tuple(long)), msg('D', uint32(ours), 'K', tuple(long)),
	} {
		if short := abridged(t, d, m, 3); len(short) > 64 || feed(t, d, short) != (decode.Message{}) {
			t.Errorf("%.20q has %d bytes abridged, want nothing of its values", m, len(short))
		}
	}
}

// What cannot be is an error, and is not read.
func TestAbridgeErrors(t *testing.T) {
	for name, m := range map[string][]byte{
		"long message":     append([]byte{'M'}, make([]byte, 1<<20)...),
		"long relation":    append([]byte{'R'}, make([]byte, 1<<20)...),
		"empty row":        {'I'},
		"beyond its end":   insert(ours, "1")[:10],
		"length too great": msg('I', uint32(ours), 'N', uint16(1), 't', uint32(1<<31)),
		"value kind":       msg('I', uint32(ours), 'N', uint16(1), 'x'),
		"second row":       msg('I', uint32(ours), 'N', tuple("1"), 'N', tuple("1")),
	} {
		if short, err := opened(t).Abridge(nil, bytes.NewReader(m), len(m), 3); err == nil {
			t.Errorf("%s: %q, want an error", name, short)
		}
	}
	if _, err := opened(t).Abridge(nil, strings.NewReader("I"), 100, 3); err != io.ErrUnexpectedEOF && err != io.EOF {
		t.Errorf("a connection that ends: %v", err)
	}
}

// zeros is an endless value.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestAbridgeHoldsNothing: a value of 900 MB is in no memory.
func TestAbridgeHoldsNothing(t *testing.T) {
	d := opened(t)
	const size = 900_000_000
	head := msg('I', uint32(ours), 'N', uint16(5), 't', uint32(1), []byte("7"), 'n', 'n', 'n', 't', uint32(size))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	short, err := d.Abridge(nil, io.MultiReader(bytes.NewReader(head), zeros{}), len(head)+size, 1<<20)
	runtime.ReadMemStats(&after)
	check(t, err)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20 {
		t.Errorf("%d bytes were allocated", used)
	}
	if e := feed(t, d, short).Event; len(e.Omitted) != 1 || e.Omitted[0].Size != size {
		t.Errorf("omitted %v, want %d bytes", e.Omitted, size)
	}
}

// FuzzAbridge: a message that can be decoded can be abridged, and decoded then. Every
// value is the same, or too long and its length is known.
func FuzzAbridge(f *testing.F) {
	for _, path := range recordings(f, "pg*.gz") {
		for i, session := range transactions(readRecording(f, path)) {
			f.Add(session, byte(i*16))
		}
	}
	tables := append(recordedTables(), events())
	f.Fuzz(func(t *testing.T, session []byte, payload byte) {
		messages, _ := split(session)
		whole, short := decode.New(tables, nil), decode.New(tables, nil)
		for _, m := range messages {
			a, abridgeErr := short.Abridge(nil, bytes.NewReader(m), len(m), int(payload))
			want, err := whole.Decode(m)
			if err != nil {
				return
			}
			if abridgeErr != nil || len(a) > len(m)+4*binary.MaxVarintLen64 && len(a) > 2*len(m) {
				t.Fatalf("%q is abridged to %q: %v", m, a, abridgeErr)
			}
			got, err := short.Decode(a)
			if err != nil || got.Kind != want.Kind {
				t.Fatalf("%q, abridged %q, is %v: %v", m, a, got.Kind, err)
			}
			if want.Event != nil {
				compareAbridged(t, got.Event, want.Event, int(payload))
			}
		}
	})
}

func compareAbridged(t *testing.T, got, want *outbox.Event, payload int) {
	if got.Table != want.Table || got.N != want.N {
		t.Fatalf("row %v/%d, want %v/%d", got.Table, got.N, want.Table, want.N)
	}
	for f, v := range want.Values {
		same := bytes.Equal(got.Values[f], v) && (got.Values[f] == nil) == (v == nil)
		short := got.Values[f] != nil && len(got.Values[f]) == 0 && (len(v) > 0 || len(want.Omitted) > 0)
		if !same && !short {
			t.Fatalf("%s is %q, want %q", outbox.Field(f), got.Values[f], v)
		}
	}
	if len(got.Omitted) == 0 && got.Hash() != want.Hash() {
		t.Fatal("another hash, and nothing is omitted")
	}
	for _, o := range got.Omitted {
		if o.Field == outbox.Payload && o.Size <= payload && len(want.Omitted) == 0 {
			t.Fatalf("%d bytes are omitted, %d may stay", o.Size, payload)
		}
	}
}
