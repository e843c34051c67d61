package table_test

import (
	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/outbox"
)

// dlq opens the dead letters as the commands do.
func (b *bench) dlq(tables ...*outbox.Table) *deadletter.Queue {
	b.t.Helper()
	q, err := deadletter.Open(b.t.Context(), deadletter.Config{Config: b.config(), Publication: "walpost", Outboxes: tables})
	b.must(err)
	b.t.Cleanup(q.Close)
	return q
}

// retry returns the ids of what was retried, and the errors of what was not.
func (b *bench) retry(q *deadletter.Queue, f deadletter.Filter) (done []int64, left map[int64]error) {
	b.t.Helper()
	left = map[int64]error{}
	b.must(q.Retry(b.t.Context(), f, false, func(o deadletter.Outcome) {
		if o.Err != nil {
			left[o.ID] = o.Err
			return
		}
		done = append(done, o.ID)
	}))
	return done, left
}

// addDeadLetter makes a dead letter of a row that only the WAL has.
func (b *bench) addDeadLetter(id, aggregate string) {
	b.t.Helper()
	ev := &outbox.Event{Table: b.table}
	for f, v := range map[outbox.Field]string{
		outbox.ID: id, outbox.EventType: "x", outbox.Payload: `{"n": 0.10}`, outbox.AggregateType: "order", outbox.AggregateID: aggregate,
		outbox.TenantID: "0", outbox.EventVersion: "1", outbox.OccurredAt: "2024-01-01 00:00:00+00",
	} {
		ev.Values[f] = []byte(v)
	}
	b.must(b.db.AddDeadLetter(b.t.Context(), ev, "subject: bad"))
}
