package decode_test

import (
	"path/filepath"
	"testing"

	"github.com/jackc/pglogrepl"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// TestRecordingsByAnotherDecoder holds the events of every recording against
// what pglogrepl reads in the same bytes.
func TestRecordingsByAnotherDecoder(t *testing.T) {
	for _, path := range recordings(t, "pg*-text.gz") {
		t.Run(filepath.Base(path), func(t *testing.T) {
			d := decode.New(recordedTables(), nil)
			relations := make(map[uint32]*pglogrepl.RelationMessage)
			rows := 0
			for _, data := range readRecording(t, path) {
				m := feed(t, d, data)
				other, err := pglogrepl.Parse(data)
				check(t, err)
				switch other := other.(type) {
				case *pglogrepl.RelationMessage:
					relations[other.RelationID] = other
				case *pglogrepl.BeginMessage:
					if m.Kind != decode.Begin || m.Commit != outbox.LSN(other.FinalLSN) || !m.CommitTime.Equal(other.CommitTime) || m.XID != other.Xid {
						t.Fatalf("begin %+v, want %+v", m, other)
					}
				case *pglogrepl.CommitMessage:
					if m.Kind != decode.Commit || m.End != outbox.LSN(other.TransactionEndLSN) || m.Commit != outbox.LSN(other.CommitLSN) {
						t.Fatalf("commit %+v, want %+v", m, other)
					}
				case *pglogrepl.InsertMessage:
					rows += compareInsert(t, m, relations[other.RelationID], other)
				default:
					if m.Kind != decode.Other {
						t.Fatalf("%T is %s", other, m.Kind)
					}
				}
			}
			if rows < 200 {
				t.Errorf("%d rows were compared", rows)
			}
		})
	}
}

func compareInsert(t *testing.T, m decode.Message, r *pglogrepl.RelationMessage, other *pglogrepl.InsertMessage) (rows int) {
	t.Helper()
	if m.Kind != decode.Row {
		if r.RelationName == "events" || r.RelationName == "parts" {
			t.Fatalf("a row of %s is %s", r.RelationName, m.Kind)
		}
		return 0
	}
	if m.Event.Table.Name != r.RelationName {
		t.Fatalf("a row of %s is one of %s", r.RelationName, m.Event.Table)
	}
	want := make(map[outbox.Field]string)
	for i, c := range other.Tuple.Columns {
		for f, column := range m.Event.Table.Layout.Columns {
			if column == r.Columns[i].Name && c.DataType == pglogrepl.TupleDataTypeText {
				want[outbox.Field(f)] = string(c.Data)
			}
		}
	}
	wantValues(t, m.Event, want)
	return 1
}
