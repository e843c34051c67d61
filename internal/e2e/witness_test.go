package e2e

import (
	"errors"
	"fmt"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/outbox"
)

// witness reads the WAL for the test: by a slot of its own, and by a decoder
// that is not the relay's.
type witness struct {
	*rig
	rows map[string]place // by their ids
	at   place
}

// place is a row's place in the WAL: its transaction's commit record, and the
// ordinal of its INSERT there.
type place struct {
	commit outbox.LSN
	n      uint32
}

const witnessSlot = "witness"

func (r *rig) newWitness() *witness {
	r.t.Helper()
	r.exec(fmt.Sprintf(`SELECT pg_create_logical_replication_slot('%s', 'pgoutput')`, witnessSlot))
	return &witness{rig: r, rows: map[string]place{}}
}

// compare sees that every message says the place that its row has in the WAL.
func (w *witness) compare() {
	w.t.Helper()
	conn := w.connect()
	defer conn.Close(w.t.Context())
	result, err := conn.Query(w.t.Context(), `SELECT data FROM pg_logical_slot_get_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', $2)`, witnessSlot, publication)
	w.must(err)
	var data []byte
	_, err = pgx.ForEachRow(result, []any{&data}, func() error { return w.take(data) })
	w.must(err)
	var rows int
	w.query(`SELECT count(*) FROM outbox_messages`, &rows)
	if rows != len(w.rows) {
		w.t.Errorf("the table holds %d rows, the WAL had %d", rows, len(w.rows))
	}
	misplaced := 0
	w.must(w.reader().Read(w.t.Context(), func(m audit.Message) {
		says := place{m.Position.Commit, m.Position.N}
		if m.Polled || w.rows[m.ID.ID] == says {
			return
		}
		if misplaced++; misplaced <= 5 {
			w.t.Errorf("row %s is at %v, its message says %v", m.ID.ID, w.rows[m.ID.ID], says)
		}
	}))
}

func (w *witness) take(data []byte) error {
	msg, err := pglogrepl.Parse(data)
	if err != nil {
		return err
	}
	switch m := msg.(type) {
	case *pglogrepl.BeginMessage:
		w.at = place{commit: outbox.LSN(m.FinalLSN)}
	case *pglogrepl.InsertMessage:
		w.at.n++
		if m.Tuple == nil || len(m.Tuple.Columns) == 0 {
			return errors.New("an INSERT without columns")
		}
		w.rows[string(m.Tuple.Columns[0].Data)] = w.at // the id is the first column
	}
	return nil
}
