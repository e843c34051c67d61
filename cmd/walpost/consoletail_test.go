package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// tailLine is any line of the tail.
type tailLine struct {
	Sequence  uint64
	Subject   string
	Type      string
	Aggregate string
	ID        string
	Tenant    string `json:"tenant_id"`
	Relayed   bool
	Bytes     int
	Payload   *string
	Base64    []byte `json:"payload_base64"`
	Cut       bool   `json:"payload_cut"`
	Ping      bool
	Skipped   uint64
	Waiting   *string
	Error     string
	Hint      string
}

// follow opens a tail. Its first line, a ping, has been read.
func (v *view) follow(query string) (next func() tailLine, leave func()) {
	v.t.Helper()
	ctx, cancel := context.WithCancel(v.t.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, v.base+"/ui/api/tail"+query, nil)
	if err != nil {
		v.t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+v.token)
	// What was not read stays with the server.
	dialer := &net.Dialer{}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, network, address)
		if err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(128 << 10)
		}
		return conn, err
	}}}
	response, err := client.Do(request)
	if err != nil {
		v.t.Fatal(err)
	}
	if kind := response.Header.Get("Content-Type"); response.StatusCode != http.StatusOK || kind != "application/x-ndjson" {
		v.t.Fatalf("tail answers %s with %s", response.Status, kind)
	}
	leave = func() {
		cancel()
		_ = response.Body.Close()
	}
	v.t.Cleanup(leave)
	lines := bufio.NewReader(response.Body)
	next = func() (l tailLine) {
		v.t.Helper()
		text, err := lines.ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(text, &l)
		}
		if err != nil {
			v.t.Fatalf("read the tail: %v in %.200s", err, text)
		}
		return l
	}
	if first := next(); !first.Ping {
		v.t.Fatalf("the first line is %+v", first)
	}
	return next, leave
}

// event is the next line that is an event.
func event(t *testing.T, next func() tailLine) tailLine {
	t.Helper()
	for {
		if l := next(); l.Sequence > 0 {
			return l
		} else if !l.Ping {
			t.Fatalf("the line is %+v", l)
		}
	}
}

// TestConsoleTail shows what is stored, as it is.
func TestConsoleTail(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v := o.consoleOf(consoleToken)
	o.untilStreaming()
	all, _ := v.follow("")
	some, _ := v.follow("?type=soon.one&type=soon.x*")
	hostile := `{"x": "<script>alert(1)</script>\u001b[31m` + "\u202e" + ` \" \\ ` + strings.Repeat("é", 40_000) + `"}`
	_, err := o.conn.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (7, 'or<b>der', 1, 'soon.two', '{}'), (7, 'order', 2, 'soon.one', $1), (7, 'order', 3, 'soon.xyz', '"é"')`, hostile)
	o.must(err)
	first, second, third := event(t, all), event(t, all), event(t, all)
	if first.Type != "soon.two" || first.Aggregate != "or<b>der/1" || first.Tenant != "7" || !first.Relayed || first.Bytes != 2 || *first.Payload != "{}" || first.Cut ||
		first.ID == "" || !strings.HasSuffix(first.Subject, ".soon.two") {
		t.Errorf("the first event is %+v", first)
	}
	stored := o.text(`SELECT payload FROM outbox_messages WHERE event_type = 'soon.one'`)
	if p := *second.Payload; !second.Cut || second.Bytes != len(stored) || len(p) > 4096 || len(p) < 4090 || !strings.HasPrefix(stored, p) {
		t.Errorf("of %d bytes %d are shown (cut: %t), of %d", second.Bytes, len(p), second.Cut, len(stored))
	}
	if *third.Payload != `"é"` {
		t.Errorf("the third event is %+v", third)
	}
	if a, b := event(t, some), event(t, some); a.Type != "soon.one" || b.Type != "soon.xyz" {
		t.Errorf("with two types come %s and %s", a.Type, b.Type)
	}
	// Another writer's message, no UTF-8, of a megabyte.
	raw := bytes.Repeat([]byte{0xff, 0, '<'}, 333_333)
	_, err = o.js.Publish(t.Context(), o.stream.Name+".soon.raw", raw)
	o.must(err)
	if e := event(t, all); e.Relayed || e.Payload != nil || !bytes.Equal(e.Base64, raw[:4096]) || !e.Cut || e.Bytes != len(raw) || e.Type != "" {
		t.Errorf("the raw message is %+v", e)
	}

	v.refused(400, "event type", "/ui/api/tail?type=", "")
	v.refused(400, "wildcard", "/ui/api/tail?type=a.>", "")
	v.refused(400, "too many", "/ui/api/tail?"+strings.Repeat("type=a&", 21), "")
	_, leave := v.follow("")
	v.follow("")
	v.refused(503, "4 viewers", "/ui/api/tail", "")
	leave()
	o.eventually("a viewer that has left makes room", func() bool {
		code, _, _ := v.do("/ui/api/tail", "")
		return code == http.StatusOK
	})
}

// TestConsoleTailSkips: what comes too fast, or is not read, is counted and passed over, and each message is either shown or
// counted.
func TestConsoleTailSkips(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v := o.consoleOf(consoleToken)
	o.untilStreaming()
	const messages = 2000
	text := bytes.Repeat([]byte{1}, 4096) // six times as long in JSON: nothing that sockets hold
	for _, reads := range []string{"at once", "late"} {
		t.Run(reads, func(t *testing.T) {
			next, leave := v.follow("")
			defer leave()
			publish := func() {
				for range messages {
					_, err := o.js.PublishAsync(o.stream.Name+".soon.many", text)
					o.must(err)
				}
				<-o.js.PublishAsyncComplete()
			}
			if reads == "late" {
				publish()
				before := time.Now()
				o.eventually("the viewer could have had a second's events", func() bool { return time.Since(before) > 3*time.Second })
			} else {
				go publish()
			}
			var shown, skipped uint64
			for shown+skipped < messages {
				l := next()
				skipped += l.Skipped
				if l.Sequence > 0 {
					shown++
				}
			}
			if shown+skipped != messages || shown == 0 || shown > messages/2 {
				t.Errorf("%d are shown and %d skipped, of %d", shown, skipped, messages)
			}
			_, err := o.js.Publish(t.Context(), o.stream.Name+".soon.last", []byte("last"))
			o.must(err)
			if e := event(t, next); *e.Payload != "last" {
				t.Errorf("after what was skipped comes %+v", e)
			}
		})
	}
}

// TestConsoleWithoutTheRelaysServer: the servers tell what the metrics would, and the tail ends with the console.
func TestConsoleWithoutTheRelaysServer(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v, stop := o.ui()
	v.follow("")
	var now struct {
		Relay      *struct{} `json:"relay"`
		RelayError string    `json:"relay_error"`
	}
	v.into(&now, "overview", "")
	if now.Relay != nil || !strings.Contains(now.RelayError, "--relay") {
		t.Errorf("without http.listen the overview says %+v", now)
	}
	t.Cleanup(o.relay())
	var series struct {
		Rate     []*float64
		Retained []*float64 `json:"retained_bytes"`
		Lag      []*float64 `json:"lag_seconds"`
		Mode     []*string
	}
	o.eventually("the series are those of walpost status", func() bool {
		o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.one', '{}')`)
		v.into(&series, "series", "")
		n := len(series.Rate) - 1
		return n >= 0 && series.Rate[n] != nil && *series.Rate[n] > 0 && series.Retained[n] != nil && series.Lag[n] != nil && *series.Mode[n] == "stream"
	})
	var sessions struct {
		Sessions   []any
		RelayError string `json:"relay_error"`
	}
	v.into(&sessions, "sessions", "")
	if sessions.Sessions == nil || len(sessions.Sessions) > 0 || sessions.RelayError == "" {
		t.Errorf("the sessions of a relay that cannot be asked are %+v", sessions)
	}
	stop()
}

// TestConsoleHostileLetters: what a dead letter holds comes through JSON as it is.
func TestConsoleHostileLetters(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v := o.consoleOf(consoleToken)
	const hostile = "<script>alert(1)</script>\x1b[31m\u202e\u0085\u2028 \"'\\u0000\\"
	document := `{"nul": "\u0000", "x": "` + strings.Repeat("\\u001b", 100_000) + `"}`
	_, err := o.conn.Exec(t.Context(), `INSERT INTO outbox_messages_dlq (outbox, row_id, event_type, aggregate_type, last_error, original, attempts)
		VALUES ($1, $1, $1, $1, $1, json_build_object('id', 1, 'tenant_id', $1::text, 'aggregate_id', $1::text, 'payload', $2::text), 1),
			('public.outbox_messages', $1, $1, $1, $1, json_build_object('id', 1, 'tenant_id', $1::text, 'aggregate_id', $1::text, 'payload', $2::text), 1)`, hostile, document)
	o.must(err)
	var list struct {
		Letters []struct {
			ID        int64
			Outbox    string
			RowID     string `json:"row_id"`
			Event     string `json:"event_type"`
			Type      string `json:"aggregate_type"`
			Aggregate string `json:"aggregate_id"`
			Tenant    string `json:"tenant_id"`
			Error     string
		}
	}
	v.into(&list, "deadletters?event_type="+url.QueryEscape(hostile), "")
	if len(list.Letters) != 2 {
		t.Fatalf("%d dead letters are found by a hostile event type", len(list.Letters))
	}
	l := list.Letters[0]
	for _, got := range []string{l.RowID, l.Event, l.Type, l.Aggregate, l.Tenant, l.Error} {
		if got != hostile {
			t.Errorf("%q is shown, want %q", got, hostile)
		}
	}
	var one struct {
		Payload string
		Bytes   int  `json:"payload_bytes"`
		Cut     bool `json:"payload_cut"`
	}
	v.into(&one, "deadletters/"+o.text(`SELECT max(dead_letter_id) FROM outbox_messages_dlq`), "")
	if one.Bytes != len(document) || !one.Cut || len(one.Payload) != 256<<10 || !strings.HasPrefix(document, one.Payload) {
		t.Errorf("of %d bytes %d are shown, cut: %t", one.Bytes, len(one.Payload), one.Cut)
	}
	code, _, text := v.do("/ui/api/deadletters", "")
	if code != 200 || bytes.ContainsAny(text, "<>\x1b") {
		t.Errorf("the list has markup or control characters: %.300s", text)
	}
}
