package decode_test

import (
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

func binaryValue(t *testing.T, typ uint32, v bin) (string, error) {
	t.Helper()
	var l outbox.Layout
	l.Columns[outbox.Payload] = "v"
	d := decode.New([]*outbox.Table{{Schema: "public", Name: "events", Layout: l}})
	feed(t, d, begin(), relation(ours, "public", "events", col{"v", typ}, col{"unmapped", 1700}))
	m, err := d.Decode(insert(ours, v, bin{0}))
	if err != nil {
		return "", err
	}
	return string(m.Event.Values[outbox.Payload]), nil
}

// The renderings were taken from the server; the recorded sessions and the
// cross test compare many more.
func TestBinaryValues(t *testing.T) {
	micro := func(v int64) bin { return msg(uint64(v)) }
	for _, c := range []struct {
		typ  uint32
		v    bin
		want string
	}{
		{16, bin{0}, "f"},
		{16, bin{1}, "t"},
		{17, bin{}, `\x`},
		{17, bin{0xDE, 0xAD}, `\xdead`},
		{19, bin("name"), "name"},
		{20, micro(math.MinInt64), "-9223372036854775808"},
		{21, bin{0xFF, 0xFE}, "-2"},
		{23, bin{0x80, 0, 0, 0}, "-2147483648"},
		{25, bin("é\x01"), "é\x01"},
		{25, bin{}, ""},
		{26, bin{0xFF, 0xFF, 0xFF, 0xFF}, "4294967295"},
		{114, bin(`{"a":  1}`), `{"a":  1}`},
		{1042, bin("a  "), "a  "},
		{1043, bin("a"), "a"},
		{1082, msg(uint32(0)), "2000-01-01"},
		{1082, msg(uint32(math.MaxInt32)), "infinity"},
		{1082, msg(uint32(1) << 31), "-infinity"},
		{1082, msg(^uint32(730119) + 1), "0001-01-01"},
		{1082, msg(^uint32(365242) + 1), "1000-01-01"},
		{1082, msg(^uint32(693960) + 1), "0100-01-01"},
		{1082, msg(^uint32(730120) + 1), "0001-12-31 BC"},
		{1114, micro(0), "2000-01-01 00:00:00"},
		{1184, micro(0), "2000-01-01 00:00:00+00"},
		{1184, micro(1), "2000-01-01 00:00:00.000001+00"},
		{1184, micro(-500_000), "1999-12-31 23:59:59.5+00"},
		{1184, micro(math.MaxInt64), "infinity"},
		{1184, micro(math.MinInt64), "-infinity"},
		{1184, micro(math.MaxInt64 - 1), "294277-01-09 04:00:54.775806+00"}, // no server stores it
		{2950, bin("\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff"), "00112233-4455-6677-8899-aabbccddeeff"},
		{3802, bin("\x01{\"a\": 1}"), `{"a": 1}`},
	} {
		if got, err := binaryValue(t, c.typ, c.v); err != nil || got != c.want {
			t.Errorf("type %d, % x: got %q, %v, want %q", c.typ, c.v, got, err, c.want)
		}
	}
}

func TestBinaryFloats(t *testing.T) {
	for want, f := range map[string]float64{
		"0": 0, "-0": math.Copysign(0, -1), "NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1),
		"0.1": 0.1, "1e+15": 1e15, "999999999999999": 999999999999999, "0.0001": 1e-4, "1e-05": 1e-5, "5e-324": 5e-324,
		"1.7976931348623157e+308": math.MaxFloat64, "9.999999999999999e+22": 1e23,
	} {
		if got, err := binaryValue(t, 701, msg(math.Float64bits(f))); err != nil || got != want {
			t.Errorf("float8 %g: got %q, %v, want %q", f, got, err, want)
		}
	}
	for want, f := range map[string]float32{
		"0": 0, "0.1": 0.1, "0.0001": 1e-4, "1e-05": 1e-5, "1e+06": 1e6, "999999": 999999, "1e-45": 1e-45, "3.4028235e+38": math.MaxFloat32,
	} {
		if got, err := binaryValue(t, 700, msg(math.Float32bits(f))); err != nil || got != want {
			t.Errorf("float4 %g: got %q, %v, want %q", f, got, err, want)
		}
	}
}

func TestBinaryErrors(t *testing.T) {
	for _, c := range []struct {
		typ  uint32
		v    bin
		want string
	}{
		{1700, bin{0, 0}, `column "v": no binary form known of the type with OID 1700`},
		{16, bin{}, "want 1 bytes, have 0"},
		{20, bin{1}, "type with OID 20: want 8 bytes, have 1"},
		{701, bin("123456789"), "want 8 bytes, have 9"},
		{2950, bin{}, "want 16 bytes, have 0"},
		{3802, bin{}, "jsonb is not of version 1"},
		{3802, bin("\x02{}"), "jsonb is not of version 1"},
	} {
		if _, err := binaryValue(t, c.typ, c.v); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("type %d, % x: error %v, want %q in it", c.typ, c.v, err, c.want)
		}
	}
}

// Values of one row do not overwrite each other while the buffer grows, and a
// huge one is not kept for ever.
func TestBinaryBuffer(t *testing.T) {
	l := events().Layout
	l.Columns[outbox.TraceID] = "trace"
	d := decode.New([]*outbox.Table{{Schema: "public", Name: "events", Layout: l}})
	feed(t, d, begin(), relation(ours, "public", "events",
		col{"id", 20}, col{"type", 16}, col{"key", 23}, col{"payload", 17}, col{"trace", 2950}))
	huge := bin(strings.Repeat("\xab", 4<<20))
	row := insert(ours, bin(msg(uint64(1))), bin{1}, bin(msg(uint32(7))), huge, bin("0123456789abcdef"))
	short := insert(ours, bin(msg(uint64(1))), bin{1}, nil, nil, nil)
	kept := heap(func() {
		m := feed(t, d, row)
		wantValues(t, m.Event, map[outbox.Field]string{
			outbox.ID: "1", outbox.EventType: "t", outbox.AggregateID: "7",
			outbox.Payload: `\x` + strings.Repeat("ab", 4<<20), outbox.TraceID: "30313233-3435-3637-3839-616263646566",
		})
		feed(t, d, short)
	})
	if kept > 1<<20 {
		t.Errorf("%d bytes are kept after the row that follows", kept)
	}
	runtime.KeepAlive(row)
	runtime.KeepAlive(d)
}
