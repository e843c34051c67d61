package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// TestViewersShareAnAnswer: those who ask the same at once, or within a second, get what was asked once.
func TestViewersShareAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s share
		var asked atomic.Int32
		ask := func(ctx context.Context) (any, error) {
			if _, ok := ctx.Deadline(); !ok {
				t.Error("a question has no limit")
			}
			time.Sleep(100 * time.Millisecond)
			return asked.Add(1), ctx.Err()
		}
		leaves, leave := context.WithCancel(t.Context())
		var viewers sync.WaitGroup
		for i := range 20 {
			viewers.Go(func() {
				ctx := t.Context()
				if i%2 == 0 {
					ctx = leaves
				}
				value, err := s.once(ctx, "x", time.Second, ask)
				if i%2 == 1 && (err != nil || value != int32(1)) {
					t.Errorf("a viewer gets %v (%v)", value, err)
				}
			})
		}
		time.Sleep(50 * time.Millisecond)
		leave() // perhaps the one that asks: the others get its answer
		viewers.Wait()
		time.Sleep(999 * time.Millisecond)
		if value, _ := s.once(t.Context(), "x", time.Second, ask); value != int32(1) {
			t.Errorf("within a second the answer is %v", value)
		}
		time.Sleep(2 * time.Millisecond)
		if value, _ := s.once(t.Context(), "x", time.Second, ask); value != int32(2) {
			t.Errorf("after a second the answer is %v", value)
		}
		s.forget()
		if value, _ := s.once(t.Context(), "x", time.Second, ask); value != int32(3) {
			t.Errorf("after a change the answer is %v", value)
		}
		for i := range mostAnswers - 1 {
			if _, err := s.once(t.Context(), fmt.Sprint(i), time.Second, func(context.Context) (any, error) { return nil, nil }); err != nil {
				t.Fatal(err)
			}
		}
		var refused *refusal
		if _, err := s.once(t.Context(), "one more", time.Second, ask); !errors.As(err, &refused) || refused.status != http.StatusServiceUnavailable {
			t.Errorf("with too many answers the error is %v", err)
		}
		time.Sleep(time.Minute)
		if _, err := s.once(t.Context(), "one more", time.Second, ask); err != nil || len(s.answers) != 1 {
			t.Errorf("a minute later %d answers are kept (%v)", len(s.answers), err)
		}
	})
}

func families(t *testing.T, text string) []*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	parsed, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	var all []*dto.MetricFamily
	for _, f := range parsed {
		all = append(all, f)
	}
	return all
}

func relayText(stored, failed, alarms, retained, started int) string {
	return fmt.Sprintf(`
# TYPE outbox_throughput_total counter
outbox_throughput_total %d
# TYPE outbox_failures_total counter
outbox_failures_total{class="size",event_type="a"} %d
outbox_failures_total{class="size",event_type="b"} 0
# TYPE walpost_mode gauge
walpost_mode{mode="poll"} 0
walpost_mode{mode="stream"} 1
# TYPE walpost_slot_retained_bytes gauge
walpost_slot_retained_bytes %[4]d
# TYPE walpost_alarms_total counter
walpost_alarms_total{alarm="rival"} 0
walpost_alarms_total{alarm="events_lost"} %[3]d
# TYPE walpost_commit_to_ack_seconds histogram
walpost_commit_to_ack_seconds_bucket{le="0.1"} %[1]d
walpost_commit_to_ack_seconds_bucket{le="0.2"} %[1]d
walpost_commit_to_ack_seconds_bucket{le="+Inf"} %[1]d
walpost_commit_to_ack_seconds_sum 0
walpost_commit_to_ack_seconds_count %[1]d
# TYPE process_start_time_seconds gauge
process_start_time_seconds %[5]d
`, stored, failed, alarms, retained, started)
}

// TestSeries: rates between two points, nothing across a restart, and the WAL's growth.
func TestSeries(t *testing.T) {
	var h history
	at := time.Unix(1_800_000_000, 0)
	old, fresh := int(at.Unix())-3600, int(at.Unix())+8
	for i, text := range []string{
		relayText(100, 0, 3, 1000, old), relayText(300, 4, 3, 3000, old), "", relayText(500, 4, 4, 7000, old),
		relayText(50, 0, 1, 9000, fresh), relayText(60, 0, 1, 11000, fresh),
	} {
		if text != "" {
			h.addMetrics(at.Add(time.Duration(i)*sampleEvery), families(t, text))
		}
		if i == 1 {
			if a := h.raised(at); len(a) != 1 || a[0].Count != 3 || a[0].LastAt != nil || a[0].Active || a[0].Severity != "critical" {
				t.Errorf("an alarm from before is %+v", a)
			}
		}
		if i == 3 {
			if a := h.raised(at.Add(6 * time.Second)); a[0].LastAt == nil || !a[0].LastAt.Equal(at.Add(6*time.Second)) || !a[0].Active {
				t.Errorf("an alarm that was raised again is %+v", a)
			}
		}
	}
	a := h.read(time.Time{}, 1_000_000)
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		T, Rate, Failures []*float64
		P50               []*float64 `json:"p50_ms"`
		Lag               []*float64 `json:"lag_seconds"`
		Budget            []*float64 `json:"budget_bytes"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if show(got.Rate) != "- 100 50 - 5" || show(got.Failures) != "- 2 0 - 0" || show(got.P50) != "- 50 50 - 50" || show(got.Lag) != "- - - - -" ||
		show(got.Budget) != "1e+06 1e+06 1e+06 1e+06 1e+06" || show(got.T[:2]) != "1.8e+09 1.800000002e+09" {
		t.Errorf("the series are %s", text)
	}
	if raised := h.raised(at.Add(time.Minute)); len(raised) != 1 || raised[0].Count != 1 || raised[0].LastAt == nil {
		t.Errorf("after a restart the alarms are %+v", raised)
	}
	if since := h.read(at.Add(8*time.Second), 0); len(since.T) != 1 || !math.IsNaN(since.Budget[0]) {
		t.Errorf("%d points come after the last but one", len(since.T))
	}
	for i := range mostPoints + 5 {
		h.add(newPoint(at.Add(time.Duration(100+i) * sampleEvery)))
	}
	if n := len(h.points); n != mostPoints {
		t.Errorf("%d points are kept, want %d", n, mostPoints)
	}
}

func show(column []*float64) string {
	var all []string
	for _, v := range column {
		if v == nil {
			all = append(all, "-")
		} else {
			all = append(all, fmt.Sprint(*v))
		}
	}
	return strings.Join(all, " ")
}

// TestForecast: a line through the last minutes, and no word of what does not grow, or was not watched for long.
func TestForecast(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	grow := func(n int, bytes func(i int) float64) (points []point) {
		for i := range n {
			p := newPoint(at.Add(time.Duration(i) * sampleEvery))
			p.retained = bytes(i)
			points = append(points, p)
		}
		return points
	}
	f := predict(grow(100, func(i int) float64 { return float64(i) * 2000 }), 1_000_000)
	if f.Growth == nil || math.Abs(*f.Growth-1000) > 0.1 || f.FullIn == nil || math.Abs(*f.FullIn-802) > 0.1 {
		t.Errorf("growing by 1000 bytes a second the forecast is %v", f)
	}
	if f := predict(grow(100, func(i int) float64 { return float64(1000 - i) }), 1_000_000); f.Growth == nil || *f.Growth >= 0 || f.FullIn != nil {
		t.Errorf("shrinking, the forecast is %+v", f)
	}
	if f := predict(grow(100, func(int) float64 { return 2_000_000 }), 1_000_000); f.FullIn != nil {
		t.Errorf("over the budget, without growth, the forecast is %+v", f)
	}
	if f := predict(grow(100, func(i int) float64 { return float64(i) * 20 }), 1_000_000); f.Growth == nil || *f.Growth <= 0 || f.FullIn != nil {
		t.Errorf("with less than a hundredth of the budget the forecast is %+v", f)
	}
	if f := predict(grow(10, func(i int) float64 { return float64(i) }), 1_000_000); f.Growth != nil {
		t.Errorf("after 18 seconds the forecast is %+v", f)
	}
	if f := predict(grow(100, func(int) float64 { return unknown }), 1_000_000); f.Growth != nil {
		t.Errorf("of what is not known the forecast is %+v", f)
	}
}

// TestTextIsCutAtACharacter, and what is no UTF-8 anywhere.
func TestTextIsCutAtACharacter(t *testing.T) {
	for text, want := range map[string]string{
		"abc": "abc", "abcd": "abcd", "abcde": "abcd", "abéé": "abé", "abcé": "abc", "ab€": "ab", "a📦": "a", "\x80\x80\x80\x80\x80": "\x80\x80\x80\x80",
	} {
		if got := string(whole([]byte(text), 4)); got != want {
			t.Errorf("%q is cut to %q, want %q", text, got, want)
		}
	}
}
