package publish

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/walpost/walpost/outbox"
)

// TestMatchingAgreesWithTheServer compares with nats-server's own idea of
// wildcards over random patterns of few tokens, where everything collides often.
func TestMatchingAgreesWithTheServer(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pattern := func(words ...string) string {
		tokens := make([]string, 1+r.IntN(4))
		for i := range tokens {
			tokens[i] = words[r.IntN(len(words))]
		}
		if r.IntN(4) == 0 && len(words) > 2 {
			tokens[len(tokens)-1] = ">"
		}
		return strings.Join(tokens, ".")
	}
	literals := func(p string) []string { // every subject of 1 to 5 tokens, in the end
		out := []string{p}
		for range 5 {
			out = append(out, pattern("a", "b"))
		}
		return out
	}
	for range 50_000 {
		a, b, s := pattern("a", "b", "*"), pattern("a", "b", "*"), pattern("a", "b")
		if got, want := Overlap(a, b), server.SubjectsCollide(a, b); got != want {
			t.Fatalf("Overlap(%q, %q) = %v, the server says %v", a, b, got, want)
		}
		if got, want := Covers([]string{a}, s), server.SubjectsCollide(a, s); got != want {
			t.Fatalf("Covers(%q, %q) = %v, the server says %v", a, s, got, want)
		}
		if matches(a, b) {
			for _, s := range literals(s) {
				if Covers([]string{b}, s) && !Covers([]string{a}, s) {
					t.Fatalf("matches(%q, %q), but %q is matched by the second only", a, b, s)
				}
			}
		}
	}
	for _, tt := range []struct {
		pattern, sub string
		want         bool
	}{{"a.>", "a.*", true}, {"a.*", "a.>", false}, {">", ">", true}, {"*.>", ">", false}, {"a.>", "a", false}, {"a.*", "a.*", true}} {
		if matches(tt.pattern, tt.sub) != tt.want {
			t.Errorf("matches(%q, %q) = %v", tt.pattern, tt.sub, !tt.want)
		}
	}
}

func rowClass(err error) string {
	var row *RowError
	if errors.As(err, &row) {
		return row.Class
	}
	return fmt.Sprint(err)
}

func TestSubjects(t *testing.T) {
	s := NewSubjects(must(NewTemplate("events.{event_type}"))(t))
	if _, err := s.Of(testEvent()); rowClass(err) != RowUncovered {
		t.Errorf("before Cover: %v", err)
	}
	s.Cover([]string{"other", "events.order.>"})
	if got := must(s.Of(testEvent()))(t); got != "events.order.placed" {
		t.Errorf("subject %q", got)
	}
	for range 2 { // the second time from the cache
		if _, err := s.Of(testEvent(outbox.EventType, "invoice.paid")); rowClass(err) != RowUncovered {
			t.Errorf("uncovered: %v", err)
		}
	}
	if _, err := s.Of(testEvent(outbox.EventType, "a b")); rowClass(err) != RowSubject {
		t.Errorf("bad subject: %v", err)
	}
	s.Cover([]string{"events.invoice.>"})
	if _, err := s.Of(testEvent()); rowClass(err) != RowUncovered {
		t.Errorf("after the stream's subjects changed: %v", err)
	}
	must(s.Of(testEvent(outbox.EventType, "invoice.paid")))(t)
}

func TestSubjectsAreBounded(t *testing.T) {
	s := NewSubjects(must(NewTemplate("e.{aggregate_id}"))(t))
	s.Cover([]string{"e.>"})
	for i := range 3 * maxCachedSubjects {
		id := fmt.Sprint(i)
		if got := must(s.Of(testEvent(outbox.AggregateID, id)))(t); got != "e."+id {
			t.Fatalf("subject %q of aggregate %s", got, id)
		}
		s.Deny("d." + id)
	}
	if len(s.cache) > maxCachedSubjects || len(s.denied) > maxCachedSubjects {
		t.Errorf("%d subjects and %d denials are remembered", len(s.cache), len(s.denied))
	}
}

func TestSubjectsDenyForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSubjects(must(NewTemplate("events.{event_type}"))(t))
		s.Cover([]string{"events.>"})
		s.Deny("events.order.placed")
		s.Cover([]string{"events.>"}) // a new session still knows
		if _, err := s.Of(testEvent()); rowClass(err) != RowPermission {
			t.Errorf("denied: %v", err)
		}
		must(s.Of(testEvent(outbox.EventType, "order.paid")))(t)
		time.Sleep(denial + time.Second)
		must(s.Of(testEvent()))(t)
	})
}

func TestSubjectsDoNotAllocate(t *testing.T) {
	s := NewSubjects(must(NewTemplate("events.{event_type}"))(t))
	s.Cover([]string{"events.>"})
	ev := testEvent()
	must(s.Of(ev))(t)
	if n := testing.AllocsPerRun(100, func() { _, _ = s.Of(ev) }); n != 0 {
		t.Errorf("Of allocates %v times", n)
	}
}
