package table_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestPartitionsOfAnotherRole: each is named, with the statement that gives it to the owner of its table.
func TestPartitionsOfAnotherRole(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`DO $$ BEGIN CREATE ROLE "the owner"; EXCEPTION WHEN duplicate_object THEN END $$; ALTER TABLE outbox_messages_archive OWNER TO "the owner"`)
	found, err := b.db.OwnerFindings(t.Context(), b.table)
	b.must(err)
	if len(found) != 1 || found[0].Code != "table-owner" || !strings.HasSuffix(found[0].Text, " to the owner, which can neither drop nor cut it") {
		t.Fatalf("found %+v", found)
	}
	_, sql, _ := strings.Cut(found[0].Fix, ": ")
	b.exec(sql)
	found, err = b.db.OwnerFindings(t.Context(), b.table)
	b.must(err)
	if len(found) > 0 {
		t.Errorf("found %+v", found)
	}
}
