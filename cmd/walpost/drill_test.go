package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/drill"
	"github.com/walpost/walpost/verify"
)

// TestDrillReport: the report for people, of a failover in which everything went wrong, and of a drill that ended early.
func TestDrillReport(t *testing.T) {
	began := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	again, caughtUp := drill.Seconds(1.5), drill.Seconds(72.25)
	found := map[verify.Kind]*verify.Findings{}
	for _, k := range verify.Kinds {
		found[k] = &verify.Findings{}
	}
	found[verify.Missing] = &verify.Findings{Count: 1, Examples: []verify.Case{{Row: "public.outbox_messages/7", Detail: "marked as stored"}}}
	r := &drill.Report{
		Drill: "failover", Database: "shop_staging", Slot: "walpost", Stream: "EVENTS", Outbox: "public.outbox_messages",
		Began: began, Injected: &began, Steps: []drill.Step{{At: began.Add(15 * time.Second), Text: "promoted\x1b[31m"}},
		Events:   drill.Events{Committed: 1500, Stored: 1490, Pending: 9, InDoubt: 1, Lost: 1, Examples: []string{"number 7"}},
		Failover: &drill.FailoverLoss{Lost: 3, Phantoms: 2}, Lost: 1, Unknown: 4, Phantoms: 2, Recovered: true,
		Again: &again, CaughtUp: &caughtUp, Longest: 60.5,
		Verify: &verify.Report{Messages: 1492, Rows: 1491, Found: found, Notes: []string{"something"}},
		Alarms: map[string]int64{"phantoms": 1, "events_lost": 2}, Notes: []string{"more"},
	}
	for _, c := range []struct {
		report *drill.Report
		broken error
		want   string
		error  string
	}{
		{r, nil, `drill       failover: database shop_staging, slot walpost, stream EVENTS
            15.0 s: promoted\u001b[31m
events      1500 committed into public.outbox_messages, 1490 stored
pending     9 are not stored yet
in doubt    1 have no message, and their commit was not answered
lost        1
duplicated  0
reordered   0
            number 7
unknown     4 messages of no row
failover    PostgreSQL lost 3 events that the primary had acknowledged; 2 have messages
phantoms    2 messages of rows that the database does not have
delivers    again 1.5s after the fault began
caught up   1m12.25s after the fault began
longest     1m0.5s from commit to stored
verify      1492 messages, 1491 rows, 1 missing, 0 duplicated, 0 reordered, 0 unknown, 0 phantom
            missing public.outbox_messages/7: marked as stored
note        something
alarms      events_lost 2, phantoms 1
note        more
`, "lost 1, duplicated 0, reordered 0, unknown 4"},
		{&drill.Report{Drill: "slot-lost", Database: "shop", Slot: "walpost", Stream: "EVENTS"}, errors.New("interrupted"), `drill       slot-lost: database shop, slot walpost, stream EVENTS
            nothing was broken
lost        0
duplicated  0
reordered   0
incomplete  the tables were not compared with the stream
`, "interrupted"},
	} {
		var out bytes.Buffer
		err := tellDrill(&out, c.report, c.broken, false)
		if out.String() != c.want {
			t.Errorf("printed\n%s\nwant\n%s", out.String(), c.want)
		}
		if err == nil || err.Error() != c.error {
			t.Errorf("error %v, want %q", err, c.error)
		}
		out.Reset()
		_ = tellDrill(&out, c.report, c.broken, true)
		var read drill.Report
		if err := json.Unmarshal(out.Bytes(), &read); err != nil || read.Lost != c.report.Lost {
			t.Errorf("printed %q: %v", out.String(), err)
		}
	}
}

// TestReadAlarms: the counters of a relay that answers, and a reason otherwise.
func TestReadAlarms(t *testing.T) {
	text := "walpost_build_info{version=\"devel\"} 1\nwalpost_alarms_total{alarm=\"phantoms\"} 0\nwalpost_alarms_total{alarm=\"events_lost\"} 12\n"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) }))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	got, err := readAlarms(t.Context(), address)
	if want := map[string]int64{"phantoms": 0, "events_lost": 12}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	_, port, _ := net.SplitHostPort(address)
	if _, err := readAlarms(t.Context(), "0.0.0.0:"+port); err != nil {
		t.Error(err)
	}
	text = "go_goroutines 1\n"
	for listen, want := range map[string]string{"": "http.listen is empty", address: "is no relay's", "127.0.0.1:1": "refused"} {
		if _, err := readAlarms(t.Context(), listen); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", listen, err, want)
		}
	}
}
