package publish

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
)

func TestParseAck(t *testing.T) {
	good := func(seq uint64, dup bool) pubAck { return pubAck{Stream: "EVENTS", Seq: seq, Duplicate: dup} }
	for reply, want := range map[string]pubAck{
		`{"stream":"EVENTS","seq":1}`:                                   good(1, false),
		`{"stream":"EVENTS","seq":18446744073709551615}`:                good(1<<64-1, false),
		`{"stream":"EVENTS","domain":"hub","seq":12}`:                   good(12, false),
		`{"stream":"EVENTS","seq":12,"domain":"hub"}`:                   good(12, false),
		`{"stream":"EVENTS","seq":12,"duplicate": true}`:                good(12, true),
		`{"stream":"EVENTS","domain":"hub","seq":12,"duplicate": true}`: good(12, true),
		`{"stream":"EVENTS","seq":12,"duplicate":true}`:                 good(12, true),
		` {"seq":3, "stream":"EVENTS"} `:                                good(3, false),
		`{"stream":"EVENTS","seq":3,"batch":"b","count":3}`:             {Stream: "EVENTS", Seq: 3, Count: 3},
		`{"stream":"EVENTS","seq":3,"error":null}`:                      good(3, false),
		`{"stream":"\u0045VENTS","seq":3}`:                              good(3, false),
		`{"stream":"EVENTS","domain":"h\"b","seq":3}`:                   good(3, false),
	} {
		got, err := parseAck(&nats.Msg{Data: []byte(reply)}, "EVENTS")
		if err != nil || got != want {
			t.Errorf("%s reads %+v, %v", reply, got, err)
		}
	}
}

func TestParseAckInvalid(t *testing.T) {
	for _, reply := range []string{
		"", "+OK", "null", "{}", "[]", `{"stream":"EVENTS"}`, `{"stream":"EVENTS","seq":0}`, `{"stream":"","seq":1}`, `{"seq":1}`,
		`{"stream":"EVENTS2","seq":1}`, `{"stream":"EVENT","seq":1}`, `{"stream":"EVENTS","seq":-1}`, `{"stream":"EVENTS","seq":1.5}`,
		`{"stream":"EVENTS","seq":01}`, `{"stream":"EVENTS","seq":18446744073709551616}`, `{"stream":"EVENTS","seq":1}x`,
		`{"stream":"EVENTS","seq":1`, `{"stream":"EVENTS","seq":1,"duplicate":"yes"}`, `{"stream":"EVENTS","domain":"` + "\x01" + `","seq":1}`,
		strings.Repeat("\xff", 1000),
	} {
		if got, err := parseAck(&nats.Msg{Data: []byte(reply)}, "EVENTS"); !errors.Is(err, errInvalidAck) || ClassOf(err) != ClassUnknown {
			t.Errorf("%.60q reads %+v, %v", reply, got, err)
		} else if len(err.Error()) > 400 {
			t.Errorf("%d bytes of error", len(err.Error()))
		}
	}
}

func TestParseAckStatusAndErrors(t *testing.T) {
	status := func(s string) *nats.Msg { return &nats.Msg{Header: nats.Header{"Status": {s}}} }
	if _, err := parseAck(status("503"), "EVENTS"); !errors.Is(err, ErrNoResponders) || ClassOf(err) != ClassTransient {
		t.Errorf("503: %v", err)
	}
	if _, err := parseAck(status("408"), "EVENTS"); !errors.Is(err, errInvalidAck) {
		t.Errorf("408: %v", err)
	}
	_, err := parseAck(&nats.Msg{Data: []byte(
		`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"},"stream":"EVENTS","seq":0}`)}, "EVENTS")
	var refused *ackError
	if !errors.As(err, &refused) || *refused != (ackError{400, 10071, "wrong last sequence: 7"}) || refused.Class() != ClassChain {
		t.Errorf("error reply: %v", err)
	}
}

// FuzzParseAck holds the hand-written path to encoding/json.
func FuzzParseAck(f *testing.F) {
	for _, s := range []string{
		`{"stream":"EVENTS","seq":1}`, `{"stream":"EVENTS","domain":"hub","seq":12,"duplicate": true}`, `{"stream":"EVENTS","seq":01}`,
		`{"stream":"EVENTS","seq":18446744073709551616}`, `{"stream":"EVENTS","seq":1,"domain":"a","duplicate":true}`,
		`{"error":{"code":400,"err_code":10071}}`, `{"stream":"EVENTS","seq":1,"seq":2}`, `{"stream":"X","seq":1}`,
	} {
		f.Add([]byte(s), "EVENTS")
	}
	f.Fuzz(func(t *testing.T, reply []byte, stream string) {
		got, err := parseAck(&nats.Msg{Data: reply}, stream)
		var r ackReply
		jsonErr := json.Unmarshal(reply, &r)
		good := jsonErr == nil && r.Error == nil && r.Stream != "" && r.Stream == stream && r.Seq > 0
		if good != (err == nil) {
			t.Fatalf("%q for stream %q reads %+v, %v; encoding/json says %+v, %v", reply, stream, got, err, r, jsonErr)
		}
		if good && got != (pubAck{Stream: r.Stream, Seq: r.Seq, Duplicate: r.Duplicate}) {
			t.Fatalf("%q reads %+v, encoding/json says %+v", reply, got, r)
		}
	})
}

func TestParseAckDoesNotAllocate(t *testing.T) {
	for _, s := range []string{`{"stream":"EVENTS","seq":123456}`, `{"stream":"EVENTS","domain":"hub","seq":12,"duplicate": true}`} {
		msg := &nats.Msg{Data: []byte(s)}
		if n := testing.AllocsPerRun(100, func() { _, _ = parseAck(msg, "EVENTS") }); n != 0 {
			t.Errorf("%s: %v allocations", s, n)
		}
	}
}

func BenchmarkParseAck(b *testing.B) {
	msg := &nats.Msg{Data: []byte(`{"stream":"EVENTS","seq":1234567}`)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseAck(msg, "EVENTS"); err != nil {
			b.Fatal(err)
		}
	}
}
