package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestProducerDeletesItsRows: a producer inserts and deletes a row in one transaction. An alarm says so at the first
// such row, and not of rows that are deleted after their marks, or that the WAL brings again. The events are stored
// once, and the slot advances.
func TestProducerDeletesItsRows(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.markWith(mark)
			r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
			x := r.start().streaming()
			r.keep()
			r.put(1, 5)
			r.pending(0)
			r.exec(`DELETE FROM public.outbox_messages`) // as retention does
			r.put(6, 10)
			r.pending(0)
			r.passes(r.here())
			x.quiet("rows_deleted")

			for n := 11; n <= 13; n++ {
				r.exec(fmt.Sprintf(`BEGIN; INSERT INTO public.outbox_messages (aggregate_type, aggregate_id, event_type, payload)
					VALUES ('order', 1, 'order.placed', '{"n": %[1]d}'); DELETE FROM public.outbox_messages WHERE payload ->> 'n' = '%[1]d'; COMMIT`, n))
				r.passes(r.here())
				a := x.alarmed("rows_deleted")
				if !contains(a["row"], "outbox_messages/11/") || !contains(a["hint"], "docs/TABLES.md#producers-that-delete-their-rows") {
					t.Errorf("after row %d the alarm says %v, want row 11 and a hint", n, a)
				}
			}
			r.storedIs(1, 13)
			if n := x.logs.FilterField(zap.String("alarm", "rows_deleted")).Len(); n != 1 {
				t.Errorf("%d alarms, want one", n)
			}
			if n := x.metric("walpost_sessions_total"); n != 0 {
				t.Errorf("%v sessions have ended on rows that are gone", n)
			}
			x.halt()

			r.rewind()
			r.duplicateWindowPasses(100 * time.Millisecond)
			x = r.start().streaming()
			r.put(14, 14)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 14)
			x.quietBut()
			x.quiet("rows_deleted", "missed_rows", "slot_given_up")
		})
	}
}

// debeziumTable is the outbox of Debezium's event router, and debeziumInsert what its producers write.
const (
	debeziumTable = `CREATE TABLE outbox (id UUID PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype VARCHAR(255) NOT NULL,
		aggregateid VARCHAR(255) NOT NULL, type VARCHAR(255) NOT NULL, payload JSONB)`
	debeziumInsert = `INSERT INTO outbox (aggregatetype, aggregateid, type, payload) SELECT 'order', '1', 'order.placed', jsonb_build_object('n', n)
		FROM generate_series(%d, %d) n`
)

// TestDebeziumsProducerKeepsItsRows is the recipe of docs/TABLES.md for Debezium's producers: they insert and do not
// delete, and the relay takes the rows.
func TestDebeziumsProducerKeepsItsRows(t *testing.T) {
	t.Parallel()
	recipes := map[outbox.Mark]struct {
		layout func(t *testing.T) outbox.Layout
		sql    string
		left   string // the rows that stay in the table
	}{
		outbox.MarkDelete: {layout: func(*testing.T) outbox.Layout { return outbox.Debezium() }, left: "0"},
		outbox.MarkJournal: {
			layout: func(t *testing.T) outbox.Layout {
				l, err := outbox.CustomLayout(map[string]string{
					"id": "seq", "aggregate_type": "aggregatetype", "aggregate_id": "aggregateid", "event_type": "type", "payload": "payload",
				})
				if err != nil {
					t.Fatal(err)
				}
				l.SetHeaders([]outbox.Header{{Column: "id", Name: "Event-Id"}})
				return l.Journaled()
			},
			sql:  `ALTER TABLE outbox ADD COLUMN seq BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE`,
			left: "20",
		},
	}
	for mark, recipe := range recipes {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			box := &outbox.Table{Schema: "public", Name: "outbox", Layout: recipe.layout(t), Mark: mark}
			r.cfg.Outboxes = []*outbox.Table{box}
			r.exec(debeziumTable)
			if mark == outbox.MarkJournal {
				r.exec(recipe.sql)
				r.exec(strings.Join(table.AppendOnlySQL(box, "public."+table.AppendOnly), ";"))
			}
			x := r.start().streaming()
			r.exec(fmt.Sprintf(debeziumInsert, 1, 10))
			r.passes(r.here())
			// What comes while no slot is there is delivered too: the rows are in the table.
			x.halt()
			r.dropSlot(r.cfg.Slot)
			r.exec(fmt.Sprintf(debeziumInsert, 11, 20))
			x = r.start().streaming()
			r.passes(r.here())
			r.storedSet(1, 20) // uuids have no order
			eventually(t, "the rows are marked", func() bool { return r.query1(`SELECT count(*) FROM outbox`) == recipe.left })
			x.quiet("rows_deleted")
			if id := r.stored()[0].Header.Get("Event-Id"); (mark == outbox.MarkJournal) != (len(id) == 36) {
				t.Errorf("the header with the event's own id is %q", id)
			}
		})
	}
}
