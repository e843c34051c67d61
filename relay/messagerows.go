package relay

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// messageRows asks the tables about the rows of messages that were read in the stream.
type messageRows struct {
	reporter *reporter
	db       *table.DB
	tables   map[string]*outbox.Table
	like     *Likenesses
}

// rowBatch is what one table says about the rows of some messages. Those are left out that have the id of a
// row, and not its subject and headers: others have published them.
type rowBatch struct {
	table    *outbox.Table
	messages []jetstream.Message
	rows     []table.Row
	states   []table.State
}

func newMessageRows(p *reporter, db *table.DB, tables []*outbox.Table, like *Likenesses) *messageRows {
	m := &messageRows{reporter: p, db: db, tables: map[string]*outbox.Table{}, like: like}
	for _, t := range tables {
		m.tables[t.String()] = t
	}
	return m
}

// each calls do with batches of rows, in the messages' order for each table.
func (m *messageRows) each(ctx context.Context, messages []jetstream.Message, do func(rowBatch) error) error {
	for part := range slices.Chunk(messages, markBatch) {
		for t, ms := range m.byTable(part) {
			batch := rowBatch{table: t, messages: ms, rows: make([]table.Row, len(ms))}
			for i, message := range ms {
				batch.rows[i] = table.Row{Ref: refOf(t, message), Bytes: message.Size}
			}
			forged := make([]bool, len(ms))
			const trouble = "rows that were read back cannot be looked up: trying again"
			err := m.patiently(ctx, t, trouble, func() (err error) {
				batch.states, err = m.db.LookUpValues(ctx, t, batch.rows, func(i int, ev *outbox.Event) {
					forged[i] = !m.like.Has(t, &ms[i], ev)
				})
				return err
			})
			if err == nil {
				m.leaveOut(&batch, forged)
				err = do(batch)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *messageRows) leaveOut(batch *rowBatch, forged []bool) {
	if !slices.Contains(forged, true) {
		return
	}
	kept := rowBatch{table: batch.table}
	for i := range forged {
		if forged[i] {
			m.reporter.alarmForged(batch.rows[i].Ref, batch.messages[i].Seq)
			continue
		}
		kept.messages, kept.rows = append(kept.messages, batch.messages[i]), append(kept.rows, batch.rows[i])
		kept.states = append(kept.states, batch.states[i])
	}
	*batch = kept
}

func refOf(t *outbox.Table, m jetstream.Message) outbox.Ref {
	return outbox.Ref{Table: t, ID: m.ID.ID, Hash: m.ID.Hash}
}

// has reports whether a message may be of a row of the relay's tables. A replay says nothing of its row.
func (m *messageRows) has(message jetstream.Message) bool {
	t := m.tables[message.ID.Table]
	return t != nil && !message.ID.Replay
}

// may reports whether a row may have an id, as far as can be said.
func (m *messageRows) may(id outbox.MessageID) bool {
	t := m.tables[id.Table]
	return t == nil || mayBeID(t, id.ID)
}

// isOther reports whether a message is of another table, or a replay.
func (m *messageRows) isOther(message jetstream.Message) bool {
	return m.tables[message.ID.Table] == nil || message.ID.Replay
}

// mayBeID reports whether a column of the table's id can hold a text. The server would need a statement to
// say so of each.
func mayBeID(t *outbox.Table, id string) bool {
	bits, isInt := map[string]int{"smallint": 16, "integer": 32, "bigint": 64}[t.IDType]
	if isInt {
		_, err := strconv.ParseInt(id, 10, bits)
		return err == nil
	}
	return t.IDType != "uuid" || len(id) == 36 && !strings.ContainsFunc(id, func(r rune) bool {
		return !strings.ContainsRune("0123456789abcdef-", r)
	})
}

// byTable sorts the messages of the relay's tables.
func (m *messageRows) byTable(messages []jetstream.Message) map[*outbox.Table][]jetstream.Message {
	sorted := map[*outbox.Table][]jetstream.Message{}
	for _, message := range messages {
		if m.has(message) {
			t := m.tables[message.ID.Table]
			sorted[t] = append(sorted[t], message)
		}
	}
	return sorted
}

// patiently asks again while the table is locked.
func (m *messageRows) patiently(
	ctx context.Context, t *outbox.Table, trouble string, ask func() error,
) error {
	for {
		err := ask()
		if err == nil || !waitsOut(err) || !m.db.Alive() {
			return err
		}
		m.reporter.trouble(trouble, err, zapTable(t))
		if !sleep.For(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}
