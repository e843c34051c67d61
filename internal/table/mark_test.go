package table_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// TestMarks: what each mark says of its rows, and the command that marks them.
func TestMarks(t *testing.T) {
	for mark, want := range map[outbox.Mark]struct {
		inTable, stays bool
		writes         []outbox.Field
		sql            string // how the command begins
	}{
		outbox.MarkUpdate: {true, true, []outbox.Field{outbox.ProcessedAt, outbox.Attempts, outbox.LastError, outbox.AvailableAt}, `UPDATE "public"."box" t SET "processed_at" = now(), `},
		outbox.MarkDelete: {true, false, []outbox.Field{outbox.Attempts, outbox.LastError, outbox.AvailableAt}, `DELETE FROM "public"."box" t WHERE `},
		outbox.MarkNone:   {false, false, nil, ""},
	} {
		box := &outbox.Table{Schema: "public", Name: "box", Layout: outbox.Canonical(), Mark: mark}
		m := table.MarkOf(box)
		if m.InTable() != want.inTable || m.Stays() != want.stays || !slices.Equal(table.Writes(box), want.writes) {
			t.Errorf("%s: in the table %t, stays %t, writes %v", mark, m.InTable(), m.Stays(), table.Writes(box))
		}
		sql := m.SQL(box)
		if (sql == "") != (want.sql == "") || !strings.HasPrefix(sql, want.sql) {
			t.Errorf("%s: %s", mark, sql)
		}
		if sql != "" && (!strings.Contains(sql, table.FreeSQL(box)) || !strings.HasSuffix(sql, " AS id")) {
			t.Errorf("%s marks other rows than those that are free, or does not tell them: %s", mark, sql)
		}
	}
}
