package table_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestRequestsThatNobodyCouldRead are refused by the table: one of them would keep all later ones waiting.
func TestRequestsThatNobodyCouldRead(t *testing.T) {
	t.Parallel()
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	conn := b.connect()
	const insert = `INSERT INTO outbox_replays (slot, outbox, `
	for _, values := range []string{
		`until) VALUES ('s', 'o', 'infinity')`, `until) VALUES ('s', 'o', '-infinity')`, `until) VALUES ('s', 'o', now() + interval '1 hour')`,
		`since) VALUES ('s', 'o', '-infinity')`, `ids) VALUES ('s', 'o', ARRAY['1', NULL])`, `ids) VALUES ('s', 'o', ARRAY[ARRAY['1']])`,
		`event_types) VALUES ('s', 'o', ARRAY[NULL]::text[])`, `state, stream_sequence) VALUES ('s', 'o', 'running', -1)`,
		`stream_created) VALUES ('s', 'o', 'infinity')`, `sent) VALUES ('s', 'o', -1)`, `state) VALUES ('s', 'o', 'odd')`,
	} {
		if _, err := conn.Exec(t.Context(), insert+values); err == nil {
			t.Errorf("the table takes %s", values)
		}
	}
	if _, err := conn.Exec(t.Context(), insert+`ids, since) VALUES ('s', 'o', '{}', now() - interval '1 hour')`); err != nil {
		t.Error(err)
	}
}
