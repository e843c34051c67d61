package relay_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
)

// TestSameEnvelopeFromTable: the same row gets the same attributes and the same body, whether
// the WAL or the table delivers it, in both formats and whatever its payload is.
func TestSameEnvelopeFromTable(t *testing.T) {
	t.Parallel()
	pg := testenv.SharedPostgres(t)
	for _, format := range []publish.Format{publish.FormatBinary, publish.FormatCloudEvents} {
		for _, typ := range []string{"jsonb", "text"} {
			t.Run(string(format)+" "+typ, func(t *testing.T) {
				t.Parallel()
				fromWAL := plainRows(newRig(t, pg), format, typ, relay.ModeStream)
				fromTable := plainRows(newRig(t, pg), format, typ, relay.ModePoll)
				for id, want := range fromWAL {
					if got := fromTable[id]; !maps.Equal(got, want) {
						t.Errorf("row %s from the table is\n%q, from the WAL\n%q", id, got, want)
					}
				}
			})
		}
	}
}

// plainRows are the messages of the rows of a table that notes no time, by the rows' ids.
func plainRows(r *rig, format publish.Format, typ string, mode relay.Mode) map[string]map[string]string {
	r.t.Helper()
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "kind", "payload": "body", "processed_at": "done"})
	r.must(err)
	r.exec(`CREATE TABLE plain (id bigint PRIMARY KEY, kind text NOT NULL, body ` + typ + `, done timestamptz)`)
	r.cfg.Outboxes = []*outbox.Table{{Schema: "public", Name: "plain", Layout: layout, Mark: outbox.MarkUpdate}}
	r.cfg.Format, r.cfg.Mode, r.cfg.Source = format, mode, "plain"
	x := r.start()
	if mode == relay.ModeStream {
		x.streaming()
	}
	r.exec(`INSERT INTO plain SELECT i, 'plain.row', v::` + typ + ` FROM unnest(ARRAY['{"a": 1}', '"text"', '[1, 2]', NULL]) WITH ORDINALITY u(v, i)`)
	if typ == "text" {
		r.exec(`INSERT INTO plain VALUES (5, 'plain.row', 'no JSON'), (6, 'plain.row', '{"a":1},"id":"forged"'), (7, 'plain.row', 'ü')`)
	}
	eventually(r.t, "the rows are marked", func() bool { return r.query1(`SELECT count(*)::text FROM plain WHERE done IS NULL`) == "0" })
	x.halt()
	rows := map[string]map[string]string{}
	for _, m := range r.stored() {
		row := map[string]string{"body": string(m.Data)}
		for name, values := range m.Header {
			if lower := strings.ToLower(name); strings.HasPrefix(lower, "ce-") || lower == "content-type" {
				row[name] = strings.Join(values, "|")
			}
		}
		id, ok := outbox.ParseMessageID("plain", m.Header.Get(nats.MsgIdHdr))
		if !ok {
			r.t.Fatalf("message id %q", m.Header.Get(nats.MsgIdHdr))
		}
		rows[id.ID] = row
	}
	if want := map[string]int{"jsonb": 4, "text": 7}[typ]; len(rows) != want {
		r.t.Fatalf("%d rows are stored, want %d", len(rows), want)
	}
	return rows
}
