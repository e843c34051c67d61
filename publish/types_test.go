package publish

import (
	"slices"
	"strings"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

func TestTypes(t *testing.T) {
	for _, c := range []struct {
		types []string
		one   string
		want  bool
	}{
		{nil, "order.placed", true},
		{nil, "", true},
		{[]string{"order.placed"}, "order.placed", true},
		{[]string{"order.placed"}, "order.placed.x", false},
		{[]string{"order"}, "order.placed", false},
		{[]string{"order.*"}, "order.placed", true},
		{[]string{"order.*"}, "order.item.added", true},
		{[]string{"order.*"}, "order", false},
		{[]string{"order.*"}, "orders.x", false},
		{[]string{"ord*"}, "order.placed", true},
		{[]string{"*"}, "", true},
		{[]string{"a", "b*"}, "bc", true},
		{[]string{"order placed"}, "order placed", true},
	} {
		types, err := ParseTypes(c.types)
		if err != nil || types.Match(c.one) != c.want {
			t.Errorf("%q match %q: %t (%v), want %t", c.types, c.one, types.Match(c.one), err, c.want)
		}
	}
	for _, bad := range []string{"", "order.>", "*.placed", "a**", "order.*.x"} {
		_, err := ParseTypes([]string{bad})
		wantError(t, err, "event type")
	}
}

func TestFilters(t *testing.T) {
	for _, c := range []struct {
		template string
		types    []string
		want     []string
	}{
		{"events.{event_type}", nil, nil},
		{"events.{event_type}", []string{"order.placed"}, []string{"events.order.placed"}},
		{"events.{event_type}", []string{"order.*"}, []string{"events.order.>"}},
		{"events.{event_type}", []string{"order.pl*"}, []string{"events.order.>"}},
		{"events.{event_type}", []string{"ord*"}, []string{"events.>"}},
		{"events.{event_type}", []string{"*"}, []string{"events.>"}},
		{"events.{event_type}", []string{"b", "a", "b"}, []string{"events.b", "events.a"}},
		{"events.{event_type}", []string{"a.b", "c", "a.*"}, []string{"events.c", "events.a.>"}},
		{"events.{event_type}", []string{"a.*", "a.b"}, []string{"events.a.>"}},
		{"events.{event_type}", []string{"order placed"}, nil},
		{"events.{event_type}", []string{"a", "order..placed*"}, nil},
		{"events.{tenant_id}.{event_type}", []string{"a.b", "c.*"}, []string{"events.*.a.b", "events.*.c.>"}},
		{"events.{event_type}.{aggregate_id}", []string{"a", "a.b"}, []string{"events.a.*", "events.a.b.*"}},
		{"events.x-{event_type}-y", []string{"a.b"}, []string{"events.x-a.b-y"}},
		{"events.x-{event_type}", []string{"a.*"}, []string{"events.x-a.>"}},
		{"events.v{event_version}-{event_type}", []string{"a.b", "c.b"}, []string{"events.*.b"}},
		{"events.{aggregate_type}", []string{"a"}, nil},
	} {
		template := must(NewTemplate(c.template))(t)
		stream := &natsjs.StreamConfig{Subjects: []string{"events.>"}}
		if got := template.Filters(stream, c.types); !slices.Equal(got, c.want) {
			t.Errorf("%s of %q: filters %q, want %q", c.template, c.types, got, c.want)
		}
		for name, moved := range map[string]*natsjs.StreamConfig{
			"transformed": {Subjects: []string{"events.>"}, SubjectTransform: &natsjs.SubjectTransformConfig{Source: ">", Destination: "x.>"}},
			"joined":      {Subjects: []string{"events.>"}, Sources: []*natsjs.StreamSource{{Name: "EVENTS_1"}}},
			"mirror":      {Mirror: &natsjs.StreamSource{Name: "EVENTS_1"}},
			"elsewhere":   {Subjects: []string{"other.>"}},
		} {
			if got := template.Filters(moved, c.types); got != nil {
				t.Errorf("%s: filters %q of a stream with other subjects", name, got)
			}
		}
	}
}

// FuzzFilters: no event of the types has a subject that the filters leave out, and no two
// filters overlap.
func FuzzFilters(f *testing.F) {
	for _, template := range []string{"events.{event_type}", "{event_type}", "a{tenant_id}{event_type}b.{aggregate_id}", "{tenant_id}.{event_type}.{event_type}"} {
		f.Add(template, "order.placed", "order.*", "7")
		f.Add(template, "order.placed.x", "ord*", "*")
		f.Add(template, "a", "*", ".")
		f.Add(template, "order.placed.x", "ord.", "*")
	}
	f.Fuzz(func(t *testing.T, text, eventType, pattern, other string) {
		template, err := NewTemplate(text)
		types, bad := ParseTypes([]string{pattern, "x.*", "y.z"})
		if err != nil || bad != nil {
			return
		}
		ev := testEvent(outbox.EventType, eventType, outbox.TenantID, other, outbox.AggregateID, other)
		subject, err := template.Render(nil, ev)
		filters := template.Filters(&natsjs.StreamConfig{Subjects: []string{">"}}, types)
		if err == nil && types.Match(eventType) && filters != nil && !jetstream.Covers(filters, string(subject)) {
			t.Errorf("%q of type %q is not among %q", subject, eventType, filters)
		}
		for i, a := range filters {
			if strings.Contains(a, "..") || slices.ContainsFunc(filters[i+1:], func(b string) bool { return jetstream.Overlap(a, b) }) {
				t.Errorf("filters %q", filters)
			}
		}
	})
}
