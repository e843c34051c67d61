package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestCommandsNameTheCatalogs runs each command over functions, operators, types and views that another role has made,
// with the names that pg_catalog's have and before them on the search_path.
func TestCommandsNameTheCatalogs(t *testing.T) {
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
		traps := testenv.SetTraps(t, o.conn.Config().ConnString())
		t.Cleanup(func() { traps.Check(t) })
		config, err := os.ReadFile(o.config)
		o.must(err)
		config = bytes.Replace(config, []byte(o.conn.Config().ConnString()), []byte(traps.URL()), 1)
		if !bytes.Contains(config, []byte(traps.URL())) {
			t.Fatal("the commands would not meet the traps")
		}
		o.must(os.WriteFile(o.config, append(config, "fallback: {max_attempts: 1, backoff: 10ms}\nretention: {archive_after: 1m, interval: 0s}\n"...), 0o600))

		o.walpost("migrate", "up", "--notify-trigger")
		if out := o.walpost("migrate", "status"); strings.Contains(out, "pending") {
			t.Errorf("migrate status says %s", out)
		}
		var doctor, stderr bytes.Buffer
		if code := execute(t.Context(), []string{"doctor", "--config", o.config}, &doctor, &stderr); code != 0 ||
			!strings.Contains(doctor.String(), "REVOKE CREATE ON SCHEMA public FROM thief") {
			t.Errorf("doctor ends with %d: %s%s", code, &doctor, &stderr)
		}
		stop := o.relay()
		o.eventually("the relay streams", func() bool { return o.status().Relay.Mode == "stream" })
		o.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.one', '{}'), ('order', 2, 'late.two', '{}'), ('order', 3, 'late.three', '{}')`)
		o.eventually("two dead letters", func() bool { return number(o.status().DeadLetters) == "2" })
		if out := o.walpost("dlq", "list", "--event-type", "late.two"); !strings.Contains(out, "late.two") {
			t.Errorf("dlq list says %s", out)
		}
		id := o.text(`SELECT dead_letter_id FROM outbox_messages_dlq ORDER BY 1 LIMIT 1`)
		o.walpost("dlq", "show", id)
		o.leaves("1", "it is not parked")
		v, stopUI := o.ui()
		for _, path := range []string{"overview", "held", "deadletters?event_type=late.two&aggregate_id=2", "deadletters/" + id, "consumers", "replays"} {
			v.into(&map[string]any{}, path, "")
		}
		v.into(&map[string]any{}, "replay/preview", `{"all": true}`)
		v.into(&map[string]any{}, "replay", `{"ids": ["1"], "expected_total": 1}`)
		v.into(&map[string]any{}, "replays/1/cancel", `{}`)
		stopUI()
		o.walpost("dlq", "retry", id)
		o.eventually("the dead letter is there again", func() bool { return number(o.status().DeadLetters) == "2" })
		o.walpost("dlq", "discard", "--all", "--yes")
		o.walpost("slot", "show")
		o.walpost("verify")
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		execute(ctx, []string{"tail", "--since", "1h", "--config", o.config}, &bytes.Buffer{}, &stderr)
		name := o.text(`SELECT current_database()`)
		o.exec("ALTER DATABASE " + name + " SET drill.allow = '" + name + "'")
		o.walpost("drill", "slot-lost", "--yes", "--rate", "0", "--for", "1s")
		o.drillsNothing()
		stop()
		o.exec(`UPDATE outbox_messages SET processed_at = processed_at - interval '1 hour'`)
		o.walpost("retention")
		if archived := o.text(`SELECT count(*) FROM outbox_messages_archive`); archived != "1" {
			t.Errorf("%s rows are archived, want 1", archived)
		}
		o.walpost("verify")
		o.walpost("slot", "drop")
		o.walpost("migrate", "down", "--to", "0")
		if gone := o.text(`SELECT to_regclass('public.outbox_messages') IS NULL`); gone != "true" {
			t.Error("the outbox is there after migrate down")
		}
	})
}

// drillsNothing: no subject of the stream takes the drill's events. They become dead letters, and nothing is broken.
func (o *office) drillsNothing() {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	o.eventually("the relay has a slot", func() bool {
		return o.text(`SELECT count(*) FROM pg_replication_slots s
		JOIN pg_stat_replication r ON r.pid = s.active_pid WHERE NOT s.temporary`) == "1"
	})
	slot := o.text(`SELECT active_pid FROM pg_replication_slots`)
	args := []string{"drill", "slot-lost", "--yes", "--rate", "5", "--patience", "2s", "--config", o.config}
	code := execute(o.t.Context(), args, &stdout, &stderr)
	if code != 1 || !strings.Contains(stderr.String(), "nothing was broken\nhint: ") || slot != o.text(`SELECT active_pid FROM pg_replication_slots`) {
		o.t.Errorf("walpost drill slot-lost ended with %d: %s%s", code, &stdout, &stderr)
	}
	o.eventually("the drill's events are dead letters", func() bool {
		return o.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0"
	})
	o.walpost("dlq", "discard", "--all", "--yes")
}
