package e2e

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// witness reads the WAL for the test: by a slot of its own, and by a decoder
// that is not the relay's.
type witness struct {
	rows map[string]place
	// unseen are the rows that were not found in the stream yet.
	unseen map[string]struct{}
}

const witnessSlot = "witness"

func (r *rig) newWitness() *witness {
	r.t.Helper()
	r.exec(fmt.Sprintf(`SELECT pg_create_logical_replication_slot('%s', 'pgoutput')`, witnessSlot))
	return &witness{rows: map[string]place{}, unseen: map[string]struct{}{}}
}

// read takes in what has been committed and flushed. Only afterwards the slot is
// moved: what a crash interrupts is read again.
func (w *witness) read(ctx context.Context, conn *pgx.Conn) error {
	result, err := conn.Query(ctx, `SELECT data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', $2)`, witnessSlot, publication)
	if err != nil {
		return err
	}
	var d dictation
	var data []byte
	_, err = pgx.ForEachRow(result, []any{&data}, func() error { return d.take(data, w) })
	if err != nil || d.end == 0 {
		return err
	}
	_, err = conn.Exec(ctx, `SELECT pg_replication_slot_advance($1, $2::text::pg_lsn)`, witnessSlot, d.end.String())
	return err
}

func (w *witness) row(id string, p place) {
	if _, again := w.rows[id]; again {
		return
	}
	w.rows[id] = p
	w.unseen[id] = struct{}{}
}

// dictation is one reading's state.
type dictation struct {
	at  place
	end pglogrepl.LSN // of the last transaction
}

func (d *dictation) take(data []byte, w *witness) error {
	msg, err := pglogrepl.Parse(data)
	if err != nil {
		return err
	}
	switch m := msg.(type) {
	case *pglogrepl.BeginMessage:
		d.at = place{commit: outbox.LSN(m.FinalLSN)}
	case *pglogrepl.InsertMessage:
		d.at.n++
		if m.Tuple == nil || len(m.Tuple.Columns) == 0 {
			return errors.New("an INSERT without columns")
		}
		w.row(string(m.Tuple.Columns[0].Data), d.at) // the id is the first column
	case *pglogrepl.CommitMessage:
		d.end = m.TransactionEndLSN
	}
	return nil
}
