package jetstream

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

func codes(found check.Findings, refused bool) []string {
	var out []string
	for _, f := range found {
		if (f.Level == check.Error) == refused {
			out = append(out, f.Code)
		}
	}
	return out
}

// TestJudge changes one thing at a time in a stream that nothing is wrong with.
func TestJudge(t *testing.T) {
	type mutation = func(*jetstream.StreamConfig, *StreamConfig)
	set := func(f func(c *jetstream.StreamConfig)) mutation {
		return func(c *jetstream.StreamConfig, _ *StreamConfig) { f(c) }
	}
	shared := func(f func(c *jetstream.StreamConfig)) mutation {
		return func(c *jetstream.StreamConfig, cfg *StreamConfig) { cfg.Shared = true; f(c) }
	}
	sources := func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "A"}} }
	schedules := func(c *jetstream.StreamConfig) { c.AllowMsgSchedules = true }
	for name, tt := range map[string]struct {
		edit             mutation
		refused, warning string
		weak             bool // accepted with accept_weak_stream
	}{
		"fine":                 {edit: set(func(*jetstream.StreamConfig) {})},
		"fine, shared":         {edit: shared(func(*jetstream.StreamConfig) {})},
		"wider subjects":       {edit: set(func(c *jetstream.StreamConfig) { c.Subjects = []string{"a", "*.>"} })},
		"persist async":        {edit: set(func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode }), refused: "stream-persist-async"},
		"no ack":               {edit: set(func(c *jetstream.StreamConfig) { c.NoAck = true }), refused: "stream-no-ack"},
		"sealed":               {edit: set(func(c *jetstream.StreamConfig) { c.Sealed = true }), refused: "stream-sealed"},
		"mirror":               {edit: set(func(c *jetstream.StreamConfig) { c.Mirror, c.Subjects = &jetstream.StreamSource{}, nil }), refused: "stream-mirror"},
		"counter":              {edit: set(func(c *jetstream.StreamConfig) { c.AllowMsgCounter = true }), refused: "stream-counter"},
		"sources":              {edit: set(sources), refused: "stream-sources"},
		"sources, shared":      {edit: shared(sources)},
		"schedules":            {edit: set(schedules), refused: "stream-schedules"},
		"schedules, shared":    {edit: shared(schedules)},
		"no window, shared":    {edit: shared(func(c *jetstream.StreamConfig) { c.Duplicates = 0 }), refused: "stream-no-duplicate-window"},
		"no window":            {edit: set(func(c *jetstream.StreamConfig) { c.Duplicates = 0 })},
		"short window, shared": {edit: shared(func(c *jetstream.StreamConfig) { c.Duplicates = time.Second }), warning: "stream-short-duplicate-window"},
		"short window":         {edit: set(func(c *jetstream.StreamConfig) { c.Duplicates = time.Second }), warning: "stream-short-duplicate-window"},
		"rollup":               {edit: set(func(c *jetstream.StreamConfig) { c.AllowRollup = true }), warning: "stream-rollup"},
		"interest":             {edit: set(func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }), refused: "stream-interest", weak: true},
		"workqueue":            {edit: set(func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy }), refused: "stream-workqueue", weak: true},
		"per subject":          {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }), refused: "stream-per-subject-limit", weak: true},
		"ttl":                  {edit: set(func(c *jetstream.StreamConfig) { c.AllowMsgTTL = true }), refused: "stream-ttl", weak: true},
		"few, discard new":     {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgs = 10 }), warning: "stream-full"},
		"other subjects":       {edit: set(func(c *jetstream.StreamConfig) { c.Subjects = []string{"orders.>", "x"} }), refused: "stream-subjects"},
		"fewer subjects":       {edit: set(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>", "events.*"} }), warning: "stream-subjects-partial"},
		"transform":            {edit: set(func(c *jetstream.StreamConfig) { c.SubjectTransform = &jetstream.SubjectTransformConfig{} }), warning: "stream-transform"},
		"memory":               {edit: set(func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }), warning: "stream-memory"},
		"one replica":          {edit: set(func(c *jetstream.StreamConfig) { c.Replicas = 1 }), warning: "stream-one-replica"},
		"discard old, bytes":   {edit: set(func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 1, jetstream.DiscardOld }), warning: "stream-discard-old"},
		"discard new, bytes":   {edit: set(func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 1<<20, jetstream.DiscardNew }), warning: "stream-full"},
		"discard new, many":    {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 2*U, jetstream.DiscardNew }), warning: "stream-full"},
		"discard old, many":    {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 2*U, jetstream.DiscardOld }), warning: "stream-discard-old"},
		"max age":              {edit: set(func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }), warning: "stream-max-age"},
		"max msg size":         {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1000 }), warning: "stream-max-msg-size"},
		"large max msg size":   {edit: set(func(c *jetstream.StreamConfig) { c.MaxMsgSize = 2 << 20 })},
	} {
		t.Run(name, func(t *testing.T) {
			c := &jetstream.StreamConfig{
				Subjects: []string{"events.>"}, Replicas: 3, Discard: jetstream.DiscardNew, MaxMsgs: -1, MaxBytes: -1, MaxMsgSize: -1,
				MaxMsgsPerSubject: -1, Duplicates: 2 * time.Minute,
			}
			cfg := StreamConfig{Name: "EVENTS", Pattern: "events.>"}
			tt.edit(c, &cfg)
			check := func(refused, warning string) {
				t.Helper()
				found := judgeConfig(cfg, c, 1<<20)
				if got := strings.Join(codes(found, true), " "); got != refused {
					t.Errorf("refused for %q, want %q", got, refused)
				}
				if got := strings.Join(codes(found, false), " "); got != warning {
					t.Errorf("warned of %q, want %q", got, warning)
				}
				for _, f := range found {
					if f.Text == "" || f.Fix == "" {
						t.Errorf("%+v", f)
					}
				}
			}
			check(tt.refused, tt.warning)
			if cfg.AcceptWeak = true; tt.weak {
				check("", tt.refused)
			} else {
				check(tt.refused, tt.warning)
			}
		})
	}
	few := &jetstream.StreamConfig{Subjects: []string{"events.>"}, Replicas: 3, MaxMsgs: U - 1, Discard: jetstream.DiscardOld}
	if got := codes(judgeConfig(StreamConfig{Pattern: "events.>"}, few, 0), true); !slices.Equal(got, []string{"stream-few-messages"}) {
		t.Errorf("max_msgs below U with discard old: %q", got)
	}
}

func TestCheckChangesNothing(t *testing.T) {
	nc, stream := newStream(t, testenv.NATSOptions{}, func(c *jetstream.StreamConfig) {
		c.Subjects, c.MaxMsgs, c.Metadata = []string{"orders.>", "x"}, 5, map[string]string{"owner": "shop"}
	})
	before := must(stream.Info(t.Context()))(t).Config
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	info, found, err := s.Check(t.Context())
	wantError(t, err, "check stream EVENTS", `"orders.>, x"`, `"events.>"`, "stream-subjects", "stream-few-messages")
	if h := hint.Of(err); !strings.Contains(h, `--subjects="orders.>" --subjects="x" --subjects="events.>"`) {
		t.Errorf("hint %s", h)
	}
	if info == nil || len(found) < 3 {
		t.Errorf("info %+v, findings %v", info, found)
	}
	wantError(t, s.Create(t.Context()), "create stream EVENTS", "already in use")
	if after := must(stream.Info(t.Context()))(t).Config; !slices.Equal(after.Subjects, before.Subjects) || after.MaxMsgs != 5 || after.Metadata["owner"] != "shop" {
		t.Errorf("the stream is now %+v", after)
	}
	if _, _, err := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "orders.>", AcceptWeak: true}))(t).Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCreateAndInfo(t *testing.T) {
	nc := connect(t, ConnConfig{URL: testenv.NewNATS(t, testenv.NATSOptions{}).URL()})
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	_, _, err := s.Check(t.Context())
	if wantError(t, err, "EVENTS", "not found"); !errors.Is(err, ErrStreamNotFound) {
		t.Errorf("%v is not ErrStreamNotFound", err)
	}
	for range 2 { // a second relay that starts at the same moment does no harm
		if err := s.Create(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	info, found, err := s.Check(t.Context())
	if err != nil || !slices.Equal(codes(found, false), []string{"stream-one-replica"}) {
		t.Errorf("findings of a stream of its own: %v, %v", found, err)
	}
	c := info.Config
	if c.Storage != jetstream.FileStorage || c.Retention != jetstream.LimitsPolicy || c.Discard != jetstream.DiscardNew || !c.AllowDirect ||
		c.Duplicates != 5*time.Second || c.Replicas != 1 || c.AllowRollup || c.MaxMsgs != -1 || !slices.Equal(c.Subjects, []string{"events.>"}) {
		t.Errorf("created %+v", c)
	}
	js := testenv.JetStream(t, nc)
	for range 3 {
		must(js.Publish(t.Context(), "events.x", nil))(t)
	}
	if err := must(js.Stream(t.Context(), "EVENTS"))(t).DeleteMsg(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	got := must(s.Info(t.Context()))(t)
	if got.FirstSeq != 2 || got.LastSeq != 3 || got.Messages != 2 || got.Created != info.Created || got.Created.IsZero() {
		t.Errorf("info %+v", got)
	}

	for i, x := range []StreamConfig{{Batching: BatchAuto}, {Batching: BatchAtomic}, {Batching: BatchSingle}, {Batching: BatchAuto, Shared: true}} {
		x.Name, x.Pattern = fmt.Sprint("S", i), fmt.Sprintf("s%d.>", i)
		stream := must(NewStream(nc, x))(t)
		if err := stream.Create(t.Context()); err != nil {
			t.Fatal(err)
		}
		if c := must(stream.Info(t.Context()))(t).Config; c.Duplicates != []time.Duration{100 * time.Millisecond, 100 * time.Millisecond, 5 * time.Second, 2 * time.Minute}[i] {
			t.Errorf("%+v: a duplicate window of %s", x, c.Duplicates)
		}
	}

	other := must(NewStream(nc, StreamConfig{Name: "OTHER", Pattern: "events.*"}))(t)
	wantError(t, other.Create(t.Context()), "OTHER", "overlap")
	wantError(t, must(NewStream(nc, StreamConfig{Name: "ALL", Pattern: ">"}))(t).Create(t.Context()), "refuses")
	_, err = must(NewStream(nc, StreamConfig{Name: "bad name", Pattern: "x"}))(t).Info(t.Context())
	if err == nil {
		t.Error("a stream name with a space")
	}
}

func TestCreateInCluster(t *testing.T) {
	cluster := testenv.NewNATSCluster(t, 3)
	nc := connect(t, ConnConfig{URL: cluster.Nodes[0].URL()})
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, found, err := s.Check(t.Context())
	if err != nil || len(found) != 0 || info.Config.Replicas != 3 {
		t.Errorf("in a cluster: %+v, %v, %v", info, found, err)
	}
}

func TestJetStreamAway(t *testing.T) {
	off := testenv.NewNATS(t, testenv.NATSOptions{Config: "accounts { A { users: [ { user: a, password: a } ] } }\nno_auth_user: a"})
	nc := connect(t, ConnConfig{URL: off.URL()})
	_, err := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t).Info(t.Context())
	wantError(t, err, "read stream EVENTS")

	on := testenv.NewNATS(t, testenv.NATSOptions{JetStream: "domain: hub"})
	nc = connect(t, ConnConfig{URL: on.URL()})
	_, err = must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>", Domain: "spoke"}))(t).Info(t.Context())
	if wantError(t, err, "read stream EVENTS"); !strings.Contains(hint.Of(err), "$JS.spoke.API.STREAM.INFO.EVENTS") {
		t.Errorf("hint %s", hint.Of(err))
	}
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>", Domain: "hub"}))(t)
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
	ack := must(must(jetstream.NewWithDomain(nc, "hub"))(t).Publish(t.Context(), "events.x", nil))(t)
	if info := must(s.Info(t.Context()))(t); ack.Domain != "hub" || info.LastSeq != 1 {
		t.Errorf("ack %+v in a domain, whose stream ends at %d", ack, info.LastSeq)
	}
}
