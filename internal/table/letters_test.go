package table_test

import (
	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// dlq opens the dead letters as the commands do.
func (b *bench) dlq(tables ...*outbox.Table) *deadletter.Queue {
	b.t.Helper()
	q, err := deadletter.Open(b.t.Context(), deadletter.Config{Config: b.config(), Outboxes: tables})
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

// addDeadLetter makes a dead letter of a row that has the id.
func (b *bench) addDeadLetter(id, aggregate string) {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) OVERRIDING SYSTEM VALUE
		VALUES (` + id + `, 'order', ` + aggregate + `, 'x', '{"n": 0.10}')`)
	row := table.Row{Ref: outbox.Ref{Table: b.table, ID: id, Hash: outbox.UnknownHash}, Failure: "subject: bad"}
	_, err := b.db.Park(b.t.Context(), b.table, []table.Row{row}, table.Retry{})
	b.must(err)
}
