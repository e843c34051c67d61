package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

const consoleToken = "a token of the console's tests"

// view is a console that is served, and how it is asked.
type view struct {
	t     *testing.T
	base  string
	token string
	host  string // empty is the base's
}

// consoleOf runs a relay with the console, until the test's end.
func (o *office) consoleOf(token string) *view {
	o.t.Helper()
	free := reserve(o.t)
	o.must(free.Close())
	v := &view{t: o.t, base: "http://" + free.Addr().String(), token: token}
	flags := []string{"--http-listen", free.Addr().String(), "--http-ui"}
	if token != "" {
		file := filepath.Join(o.t.TempDir(), "token")
		o.must(os.WriteFile(file, []byte(token+"\n"), 0o600))
		flags = append(flags, "--http-token-file", file)
	}
	o.t.Cleanup(o.relay(flags...))
	o.eventually("the relay is ready", func() bool {
		response, err := v.client().Get(v.base + "/readyz")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return v
}

func (v *view) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: testenv.Patience}
}

// do sends a request. With a body it is a POST, of the type JSON unless the headers say otherwise.
func (v *view) do(path, body string, headers ...string) (int, http.Header, []byte) {
	v.t.Helper()
	method := http.MethodGet
	if body != "" {
		method = http.MethodPost
	}
	request, err := http.NewRequestWithContext(v.t.Context(), method, v.base+path, strings.NewReader(body))
	if err != nil {
		v.t.Fatal(err)
	}
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	if v.token != "" {
		request.Header.Set("Authorization", "Bearer "+v.token)
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
		if headers[i+1] == "" {
			request.Header.Del(headers[i])
		}
	}
	request.Host = v.host
	response, err := v.client().Do(request)
	if err != nil {
		v.t.Fatal(err)
	}
	defer response.Body.Close()                                        //nolint:errcheck // read to its end
	if response.Header.Get("Content-Type") == "application/x-ndjson" { // it does not end
		return response.StatusCode, response.Header, nil
	}
	text, err := io.ReadAll(response.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return response.StatusCode, response.Header, text
}

// into asks for something that is to be there.
func (v *view) into(to any, path, body string) {
	v.t.Helper()
	code, _, text := v.do("/ui/api/"+path, body)
	if code != http.StatusOK {
		v.t.Fatalf("%s %s answers %d: %s", path, body, code, text)
	}
	if err := json.Unmarshal(text, to); err != nil {
		v.t.Fatalf("%s: %v in %s", path, err, text)
	}
}

// refused asks for something that is to be refused with a status and a hint.
func (v *view) refused(want int, part, path, body string, headers ...string) {
	v.t.Helper()
	code, _, text := v.do(path, body, headers...)
	var e struct{ Error, Hint string }
	if err := json.Unmarshal(text, &e); err != nil || code != want || e.Error == "" || e.Hint == "" ||
		!strings.Contains(e.Error+"\n"+e.Hint, part) {
		v.t.Errorf("%s %s %v answers %d %s (%v), want %d with %q and a hint", path, body, headers, code, text, err, want, part)
	}
}

// TestConsoleToken: without the token nothing of the API is told, and a browser of another site gets nothing done.
func TestConsoleToken(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v := o.consoleOf(consoleToken)
	o.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, event_type, last_error) VALUES ('public.outbox_messages', '1', 'a', 'x')`)

	routes := []string{"overview", "series", "sessions", "held", "deadletters", "deadletters/1", "tail", "consumers", "replays", "alarms", "doctor", "nothing"}
	changes := []string{"deadletters/retry", "deadletters/discard", "replay/preview", "replay", "replays/1/cancel"}
	for _, path := range routes {
		v.refused(401, "token", "/ui/api/"+path, "", "Authorization", "")
		v.refused(401, "token", "/ui/api/"+path, "", "Authorization", "Bearer wrong")
		v.refused(401, "token", "/ui/api/"+path, "", "Authorization", "Basic "+consoleToken)
		v.refused(401, "token", "/ui/api/"+path+"?token="+"x", "", "Authorization", "")
	}
	for _, path := range changes {
		v.refused(401, "token", "/ui/api/"+path, `{"ids": [1]}`, "Authorization", "")
		v.refused(415, "application/json", "/ui/api/"+path, `{"ids": [1]}`, "Content-Type", "text/plain")
		v.refused(415, "application/json", "/ui/api/"+path, `ids=1`, "Content-Type", "application/x-www-form-urlencoded")
		v.refused(415, "application/json", "/ui/api/"+path, `{"ids": [1]}`, "Content-Type", "")
		v.refused(403, "another site", "/ui/api/"+path, `{"ids": [1]}`, "Origin", "https://evil.example")
		v.refused(403, "another site", "/ui/api/"+path, `{"ids": [1]}`, "Sec-Fetch-Site", "cross-site")
		v.refused(405, "POST", "/ui/api/"+path, "")
	}
	foreign := *v
	for _, host := range []string{"evil.example", "evil.example:9464", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0"} {
		foreign.host = host
		foreign.refused(421, "127.0.0.1", "/ui/api/overview", "")
		foreign.refused(421, "127.0.0.1", "/ui/", "")
	}
	for _, host := range []string{"localhost", "localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"} {
		foreign.host = host
		if code, _, text := foreign.do("/ui/api/overview", ""); code != 200 {
			t.Errorf("host %s answers %d: %s", host, code, text)
		}
	}
	if n := o.text(`SELECT count(*) FROM outbox_messages_dlq`); n != "1" {
		t.Errorf("%s dead letters are left", n)
	}

	code, header, _ := v.do("/ui/", "", "Authorization", "")
	if code != 200 || header.Get("Content-Type") != "text/html; charset=utf-8" ||
		!strings.HasPrefix(header.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'") ||
		header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Referrer-Policy") != "no-referrer" {
		t.Errorf("the page answers %d with %v", code, header)
	}
	if _, header, _ := v.do("/ui/api/overview", ""); header.Get("Cache-Control") != "no-store" || header.Get("Content-Security-Policy") == "" {
		t.Errorf("the API answers with %v", header)
	}
	if code, _, text := v.do("/", "", "Authorization", ""); code != 200 || !strings.HasPrefix(strings.ToLower(string(text)), "<!doctype html") {
		t.Errorf("/ does not lead to the page: %d %.100s", code, text)
	}
	v.refused(404, "/ui/", "/ui/console.go", "")
	v.refused(404, "/ui/", "/ui/..%2fsecure.go", "")
	for path, want := range map[string]int{"/ui/docs/": 200, "/ui/docs/ALARMS.html": 200, "/ui/docs/x": 404} {
		code, header, text := v.do(path, "", "Authorization", "")
		if code != want || code == 200 && !strings.Contains(string(text), "walpost") || !strings.HasPrefix(header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s answers %d with %v", path, code, header)
		}
	}
}

// TestConsoleWithoutToken only shows.
func TestConsoleWithoutToken(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	v := o.consoleOf("")
	var now struct {
		CanChange     bool   `json:"can_change"`
		ChangeHint    string `json:"change_hint"`
		ShowsPayloads bool   `json:"shows_payloads"`
		Status        struct{ Relay struct{ Mode string } }
		Relay         struct{ State string }
	}
	o.eventually("the relay streams", func() bool {
		v.into(&now, "overview", "")
		return now.Status.Relay.Mode == "stream" && now.Relay.State == "streaming"
	})
	o.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, event_type, payload, last_error) VALUES ('public.outbox_messages', '1', 'a', '{"private": 1}', 'x')`)
	next, _ := v.follow("")
	o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.one', '{"private": 1}')`)
	if e := event(t, next); e.Bytes != 14 || e.Payload != nil || e.Base64 != nil || e.Type != "soon.one" {
		t.Errorf("without a token the tail shows %+v", e)
	}
	if _, _, text := v.do("/ui/api/deadletters/1", ""); !strings.Contains(string(text), `"payload":null`) || strings.Contains(string(text), "private") {
		t.Errorf("without a token the dead letter is %s", text)
	}
	if now.ShowsPayloads || now.CanChange || !strings.Contains(now.ChangeHint, "http.token_file") {
		t.Errorf("the overview says %+v", now)
	}
	for _, path := range []string{"deadletters/retry", "deadletters/discard", "replay/preview", "replay", "replays/1/cancel"} {
		v.refused(403, "WALPOST_HTTP_TOKEN_FILE", "/ui/api/"+path, `{"ids": [1]}`)
	}
}

// TestConsoleShows: each route over a relay with a parked row, held ones, dead letters and a replay.
func TestConsoleShows(t *testing.T) {
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
		config, err := os.ReadFile(o.config)
		o.must(err)
		o.must(os.WriteFile(o.config, append(config, "fallback: {max_attempts: 2, backoff: 1s}\n"...), 0o600))
		o.walpost("migrate", "up")
		v := o.consoleOf(consoleToken)
		o.showsOverview(v)
		o.showsHeld(v)
		o.showsDeadLetters(v)
		o.showsReplays(v)
		o.showsTheRest(v)
	})
}

func (o *office) showsOverview(v *view) {
	o.untilStreaming()
	o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n, 'soon.one', '{}' FROM generate_series(1, 50) n`)
	var now struct {
		Version   string
		CanChange bool `json:"can_change"`
		Status    json.RawMessage
	}
	o.eventually("the rows are delivered", func() bool { return o.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0" })
	v.into(&now, "overview", "")
	var shown, printed map[string]any
	o.must(json.Unmarshal(now.Status, &shown))
	o.must(json.Unmarshal([]byte(o.walpost("status", "--json")), &printed))
	for key := range printed {
		if _, ok := shown[key]; !ok {
			o.t.Errorf("the overview's status lacks %s", key)
		}
	}
	if len(shown) != len(printed) || !now.CanChange || now.Version == "" {
		o.t.Errorf("the overview is %+v", now)
	}

	var series struct {
		T, Rate  []*float64
		Retained []*float64 `json:"retained_bytes"`
		P99      []*float64 `json:"p99_ms"`
		Mode     []*string
	}
	o.eventually("the series have a rate", func() bool {
		v.into(&series, "series", "")
		for i, rate := range series.Rate {
			if rate != nil && *rate > 0 && series.P99[i] != nil && *series.Mode[i] == "stream" {
				return true
			}
		}
		return false
	})
	n := len(series.T)
	v.into(&series, fmt.Sprintf("series?since=%.0f", *series.T[n-1]*1000), "")
	if len(series.T) > 1 || len(series.T) != len(series.Retained) {
		o.t.Errorf("%d points came after the last one", len(series.T))
	}
	var sessions struct {
		Sessions []struct {
			Mode, Reason string
			Stored       int
			Ended        *time.Time
		}
	}
	v.into(&sessions, "sessions", "")
	if s := sessions.Sessions; len(s) != 2 || s[0].Mode != "stream" || s[0].Ended != nil || s[0].Stored != 50 || s[1].Reason != "mode_changed" {
		o.t.Errorf("the sessions are %+v", s)
	}
}

func (o *office) showsHeld(v *view) {
	// The stream does not take the subjects late.>.
	o.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 7, 'order', 1000, CASE n WHEN 1 THEN 'late.two' ELSE 'soon.two' END, '{}' FROM generate_series(1, 5) n`)
	var held struct {
		Total      int
		Limit      bool `json:"limit_reached"`
		Aggregates []struct {
			Outbox   string
			Tenant   string `json:"tenant_id"`
			Type     string `json:"aggregate_type"`
			ID       string `json:"aggregate_id"`
			Rows     int
			ParkedID string     `json:"parked_id"`
			Event    string     `json:"event_type"`
			Since    *time.Time `json:"since"`
			Attempts int
			RetryAt  *time.Time `json:"retry_at"`
			Error    string
		}
	}
	o.eventually("an aggregate with five rows waits", func() bool {
		v.into(&held, "held", "")
		return held.Total == 1 && held.Aggregates[0].Rows == 5
	})
	a := held.Aggregates[0]
	parked := o.text(`SELECT id FROM outbox_messages WHERE event_type = 'late.two'`)
	if held.Limit || a.Outbox != "public.outbox_messages" || a.Tenant != "7" || a.Type != "order" || a.ID != "1000" || a.ParkedID != parked ||
		a.Event != "late.two" || a.Since == nil || a.Attempts < 1 || a.RetryAt == nil || !strings.HasPrefix(a.Error, "uncovered: ") {
		o.t.Errorf("the aggregate is %+v, its parked row %s", a, parked)
	}
}

type consoleLetters struct {
	Total   int
	Limited bool `json:"total_limit"`
	Letters []struct {
		ID       int64
		RowID    string `json:"row_id"`
		Event    string `json:"event_type"`
		Error    string
		Attempts int
		Bytes    int `json:"payload_bytes"`
	}
	Next *int64
}

func (o *office) showsDeadLetters(v *view) {
	var all consoleLetters
	o.eventually("the parked row is dead, and the others are delivered", func() bool {
		v.into(&all, "deadletters", "")
		return all.Total == 1 && o.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0"
	})
	one := all.Letters[0]
	if one.Event != "late.two" || one.Attempts < 2 || one.Bytes != 2 || !strings.HasPrefix(one.Error, "uncovered: ") {
		o.t.Errorf("the dead letter is %+v", one)
	}
	var whole struct {
		ID      int64
		Payload string
		Cut     bool `json:"payload_cut"`
	}
	v.into(&whole, fmt.Sprint("deadletters/", one.ID), "")
	if whole.ID != one.ID || whole.Payload != "{}" || whole.Cut {
		o.t.Errorf("the dead letter is %+v", whole)
	}
	v.refused(404, "dlq list", "/ui/api/deadletters/4711", "")
	v.refused(400, "number", "/ui/api/deadletters/0x10", "")
	v.refused(400, "limit", "/ui/api/deadletters?limit=abc", "")
	v.refused(400, "limit", "/ui/api/deadletters?limit=0", "")
	v.refused(400, "limit", "/ui/api/held?limit=100000", "")
	v.refused(400, "event_type", "/ui/api/deadletters?event_type=%00", "")
	v.refused(400, "too many", "/ui/api/deadletters/retry", `{"ids": [`+strings.Repeat("1,", 10)+idsFrom(1, 501)+`]}`)
	v.refused(400, "named", "/ui/api/deadletters/retry", `{}`)
	v.refused(400, "read the request", "/ui/api/deadletters/retry", `{"all": true}`)
	v.refused(400, "read the request", "/ui/api/deadletters/retry", `{"ids": [1]} {}`)
	v.refused(400, "read the request", "/ui/api/deadletters/retry", `{"ids": ["x"]}`)
	v.refused(413, "larger", "/ui/api/deadletters/retry", `{"ids": [`+idsFrom(1_000_000, 60_000)+`]}`)

	// Newest first, page by page.
	o.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, event_type, aggregate_type, aggregate_id, original, payload, last_error, attempts)
		SELECT 'public.outbox_messages', n, 'page.one', 'page', n % 3, json_build_object('id', n, 'aggregate_id', n % 3, 'payload', '{}'::json), '{}', 'x', 1
		FROM generate_series(900001, 900007) n`)
	var seen []int64
	for before := ""; ; {
		var page consoleLetters
		v.into(&page, "deadletters?limit=3&event_type=page.one"+before, "")
		if page.Total != 7 {
			o.t.Fatalf("%d dead letters are counted, want 7", page.Total)
		}
		for _, l := range page.Letters {
			seen = append(seen, l.ID)
		}
		if page.Next == nil {
			break
		}
		before = fmt.Sprint("&before=", *page.Next)
	}
	for i := 1; i < len(seen); i++ {
		if seen[i] >= seen[i-1] {
			o.t.Errorf("the pages have the ids %v", seen)
		}
	}
	if len(seen) != 7 {
		o.t.Errorf("the pages have the ids %v", seen)
	}
	var third consoleLetters
	v.into(&third, "deadletters?aggregate_id=2", "")
	if third.Total != 2 {
		o.t.Errorf("aggregate 2 has %d dead letters, want 2", third.Total)
	}

	// What became of each is told.
	var changed struct {
		Done   []int64
		Failed []struct {
			ID          int64
			Error, Hint string
		}
	}
	v.into(&changed, "deadletters/retry", fmt.Sprintf(`{"ids": [%d, %d, 999999]}`, one.ID, seen[0]))
	if len(changed.Done) != 1 || changed.Done[0] != one.ID || len(changed.Failed) != 2 || changed.Failed[0].Error == "" || changed.Failed[0].Hint == "" ||
		changed.Failed[1].ID != 999999 || changed.Failed[1].Hint == "" {
		o.t.Errorf("retry tells %+v", changed)
	}
	v.into(&changed, "deadletters/discard", `{"ids": [`+strings.Trim(strings.ReplaceAll(fmt.Sprint(seen), " ", ","), "[]")+`]}`)
	if len(changed.Done) != 7 {
		o.t.Errorf("discard tells %+v", changed)
	}
	o.eventually("the retried row is dead again", func() bool {
		v.into(&all, "deadletters", "")
		return all.Total == 1 && all.Letters[0].RowID == one.RowID && all.Letters[0].ID != one.ID
	})
}

func idsFrom(first, n int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprint(first+i))
	}
	return strings.Join(all, ",")
}

func (o *office) showsReplays(v *view) {
	const some = `"outbox": "public.outbox_messages", "event_types": ["soon.one"], "aggregate": "order"`
	var preview struct {
		Total  *int
		ByType []struct {
			Event string `json:"event_type"`
			Rows  int
		} `json:"by_type"`
		Warning string
	}
	v.into(&preview, "replay/preview", `{`+some+`}`)
	if preview.Total == nil || *preview.Total != 50 || len(preview.ByType) != 1 || preview.ByType[0].Event != "soon.one" || preview.Warning != "" {
		o.t.Fatalf("the preview is %+v", preview)
	}
	for _, path := range []string{"/ui/api/replay", "/ui/api/replay/preview"} {
		v.refused(400, "which rows", path, `{"outbox": "public.outbox_messages"}`)
		v.refused(400, "excludes", path, `{`+some+`, "all": true}`)
		v.refused(400, "public.outbox_messages", path, `{"outbox": "x", "all": true}`)
		v.refused(400, "2026", path, `{`+some+`, "since": "yesterday"}`)
		v.refused(400, "before", path, `{`+some+`, "since": "2026-02-01T00:00:00Z", "until": "2026-01-01T00:00:00Z"}`)
		v.refused(400, "ids", path, `{"ids": ["x"]}`)
		v.refused(400, "empty", path, `{"ids": [""]}`)
		v.refused(400, "NUL", path, `{"event_types": ["\u0000"]}`)
	}
	v.refused(409, "preview", "/ui/api/replay", `{`+some+`}`)
	v.refused(409, "50 rows", "/ui/api/replay", `{`+some+`, "expected_total": 49}`)
	v.refused(400, "delivered", "/ui/api/replay", `{"event_types": ["nothing"], "expected_total": 0}`)
	var requested struct {
		ID int64 `json:"replay_id"`
	}
	v.into(&requested, "replay", `{`+some+`, "expected_total": 50}`)
	var list struct {
		Replays []struct {
			ID    int64 `json:"replay_id"`
			State string
			Sent  int
			Total int
		}
	}
	o.eventually("the replay is done", func() bool {
		v.into(&list, "replays", "")
		return len(list.Replays) == 1 && list.Replays[0].ID == requested.ID && list.Replays[0].State == "done" && list.Replays[0].Sent == 50
	})
	v.refused(409, "done", fmt.Sprintf("/ui/api/replays/%d/cancel", requested.ID), `{}`)
	v.refused(404, "replay list", "/ui/api/replays/4711/cancel", `{}`)
	v.refused(400, "number", "/ui/api/replays/x/cancel", `{}`)
	// One that no relay works on can be cancelled.
	o.exec(`INSERT INTO outbox_replays (slot, outbox) VALUES ('elsewhere', 'public.outbox_messages')`)
	id := o.text(`SELECT max(replay_id) FROM outbox_replays`)
	var cancelled struct{ State string }
	v.into(&cancelled, "replays/"+id+"/cancel", `{}`)
	if cancelled.State != "cancelled" {
		o.t.Errorf("a cancelled replay is %s", cancelled.State)
	}
}

func (o *office) showsTheRest(v *view) {
	var consumers struct {
		Consumers   []struct{ Consumer string }
		Error, Hint string
	}
	v.into(&consumers, "consumers", "")
	if consumers.Error != "" || consumers.Consumers == nil {
		o.t.Errorf("the consumers are %+v", consumers)
	}
	o.exec(`ALTER TABLE consumer_definitions RENAME TO away`)
	o.eventually("it says what makes the tables of consumers, and that is no error", func() bool {
		v.into(&consumers, "consumers", "")
		return consumers.Error == "" && strings.Contains(consumers.Hint, "walpost migrate up --only consumer")
	})
	o.exec(`ALTER TABLE away RENAME TO consumer_definitions`)
	var doctor struct {
		Findings []struct{ Code, Level, Text, Fix string }
	}
	v.into(&doctor, "doctor", "")
	if len(doctor.Findings) == 0 {
		o.t.Error("doctor finds nothing")
	}
	var alarms struct {
		Alarms []struct {
			Alarm, Severity, Summary, Runbook string
			Count                             int
			LastAt                            *time.Time `json:"last_at"`
			Active                            bool
		}
	}
	v.into(&alarms, "alarms", "")
	if len(alarms.Alarms) != 0 {
		o.t.Errorf("the alarms are %+v", alarms.Alarms)
	}
	o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', 1, 'soon.one', '{}', now())`)
	o.eventually("the alarm is shown", func() bool {
		v.into(&alarms, "alarms", "")
		return len(alarms.Alarms) == 1
	})
	if a := alarms.Alarms[0]; a.Alarm != "inserted_marked" || a.Severity != "warning" || a.Summary == "" || a.Count != 1 || a.LastAt == nil || !a.Active ||
		a.Runbook != "docs/ALARMS.html#inserted_marked" {
		o.t.Errorf("the alarm is %+v", a)
	}
	// The console has two connections at most, whoever asks for what.
	answers := make(chan int)
	paths := []string{"overview", "held", "deadletters", "consumers", "replays", "held?limit=3", "deadletters?limit=3", "deadletters/1"}
	for _, path := range paths {
		go func() {
			code, _, _ := v.do("/ui/api/"+path, "")
			answers <- code
		}()
	}
	for range paths {
		<-answers
	}
	// The server process of a closed connection may take a moment to end.
	o.eventually("the console has one connection or two", func() bool {
		n := o.text(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walpost console' AND datname = current_database()`)
		return n == "1" || n == "2"
	})
}

// ui runs the command until the returned function is called.
func (o *office) ui(flags ...string) (v *view, stop func()) {
	o.t.Helper()
	ctx, cancel := context.WithCancel(o.t.Context())
	var stdout, stderr output
	ended := make(chan int, 1)
	go func() {
		ended <- execute(ctx, append([]string{"ui", "--config", o.config}, flags...), &stdout, &stderr)
	}()
	o.eventually("the address is printed", func() bool { return stdout.has("#token=") })
	base, token, ok := strings.Cut(stdout.lines()[0], "/ui/#token=")
	if !ok || len(token) < 16 {
		o.t.Fatalf("walpost ui prints %q", stdout.lines())
	}
	return &view{t: o.t, base: base, token: token}, func() {
		cancel()
		if code := <-ended; code != 0 {
			o.t.Errorf("walpost ui ends with %d: %q", code, stderr.lines())
		}
	}
}

// TestUICommand serves until it is stopped, with a token of its own.
func TestUICommand(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	free := reserve(t)
	o.must(free.Close())
	t.Cleanup(o.relay("--http-listen", free.Addr().String()))
	v, stop := o.ui("--relay", "http://"+free.Addr().String())
	defer stop()
	v.refused(401, "walpost ui", "/ui/api/overview", "", "Authorization", "")
	var now struct {
		CanChange  bool `json:"can_change"`
		Relay      struct{ State string }
		RelayError *string `json:"relay_error"`
	}
	o.eventually("the relay's own status is shown", func() bool {
		v.into(&now, "overview", "")
		return now.Relay.State == "streaming"
	})
	if !now.CanChange || now.RelayError != nil {
		t.Errorf("the overview says %+v", now)
	}
	var series struct {
		Mode []*string
	}
	o.eventually("the relay's metrics are read", func() bool {
		v.into(&series, "series", "")
		return len(series.Mode) > 0 && series.Mode[len(series.Mode)-1] != nil
	})
}
