package publish

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walpost/walpost/outbox"
)

func rowClass(err error) string {
	var row *outbox.RowError
	if errors.As(err, &row) {
		return row.Class
	}
	return fmt.Sprint(err)
}

func TestSubjects(t *testing.T) {
	s := NewSubjects(must(NewTemplate("events.{event_type}"))(t))
	if _, err := s.Of(testEvent()); rowClass(err) != outbox.RowUncovered {
		t.Errorf("before Cover: %v", err)
	}
	s.Cover([]string{"other", "events.order.>"})
	if got := must(s.Of(testEvent()))(t); got != "events.order.placed" {
		t.Errorf("subject %q", got)
	}
	for range 2 { // the second time from the cache
		if _, err := s.Of(testEvent(outbox.EventType, "invoice.paid")); rowClass(err) != outbox.RowUncovered {
			t.Errorf("uncovered: %v", err)
		}
	}
	if _, err := s.Of(testEvent(outbox.EventType, "a b")); rowClass(err) != outbox.RowSubject {
		t.Errorf("bad subject: %v", err)
	}
	s.Cover([]string{"events.invoice.>"})
	if _, err := s.Of(testEvent()); rowClass(err) != outbox.RowUncovered {
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
		if _, err := s.Of(testEvent()); rowClass(err) != outbox.RowPermission {
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
