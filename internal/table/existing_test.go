package table_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestIndexesOfAStatus: a table with a status lacks the indexes that its advice makes, and nothing then.
func TestIndexesOfAStatus(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for kind, states := range map[string][outbox.NumStates]string{
			"smallint": {outbox.Done: "2", outbox.Failed: "3", outbox.Dead: "4"},
			"state":    {outbox.Done: "sent", outbox.Failed: "failed", outbox.Dead: "dead"},
			"boolean":  {outbox.Done: "true"},
			"text":     {outbox.Done: "it's sent"},
		} {
			b := newBench(t, pg, outbox.MarkUpdate)
			b.exec(`CREATE TYPE public.state AS ENUM ('new', 'sent', 'failed', 'dead')`)
			b.exec(fmt.Sprintf(`CREATE TABLE box (id bigint PRIMARY KEY, kind text, about text, body jsonb, state %s,
				tries int, next timestamptz, sent timestamptz)`, kind))
			l, err := outbox.CustomLayout(map[string]string{
				"id": "id", "event_type": "kind", "aggregate_id": "about", "payload": "body", "attempts": "tries",
				"available_at": "next", "processed_at": "sent",
			})
			b.must(err)
			l.Columns[outbox.Status], l.States = "state", states
			box := &outbox.Table{Schema: "public", Name: "box", Layout: l, Mark: outbox.MarkUpdate}
			b.must(b.open().CheckTable(t.Context(), box))
			if kind == "boolean" && box.Layout.States[outbox.Done] != "t" {
				t.Errorf("the server renders true as %q", box.Layout.States[outbox.Done])
			}
			found, err := b.open().IndexFindings(t.Context(), box)
			b.must(err)
			if want := map[bool]int{true: 4, false: 3}[l.Records()]; len(found) != want {
				t.Errorf("%s: %d indexes are missing, want %d: %v", kind, len(found), want, found)
			}
			for _, f := range found {
				b.exec(strings.Replace(f.Fix, " CONCURRENTLY", "", 1))
			}
			if found, err = b.open().IndexFindings(t.Context(), box); err != nil || len(found) > 0 {
				t.Errorf("%s: the indexes that were advised are missing: %v %v", kind, found, err)
			}
		}
	})
}
