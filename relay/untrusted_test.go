package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
)

// untrusted has the outbox in schema shop, whose owner is not the relay's role, and what a role made there that may create objects:
// by the names of walpost's tables, one with a trigger, and views that call its function. The tables are in public.
func untrusted(t *testing.T) (r *rig, caught func() string) {
	t.Helper()
	r = newRig(t, testenv.SharedPostgres(t))
	of := r.query1(`SELECT current_database()`)
	names := strings.NewReplacer("{owner}", "owner_"+of, "{relay}", "relay_"+of, "{stranger}", "stranger_"+of)
	r.exec(names.Replace(`CREATE ROLE {owner}; CREATE ROLE {relay} LOGIN REPLICATION; CREATE ROLE {stranger};
		CREATE SCHEMA shop AUTHORIZATION {owner}; ALTER TABLE outbox_messages SET SCHEMA shop; ALTER TABLE shop.outbox_messages OWNER TO {owner};
		GRANT USAGE ON SCHEMA shop TO {relay}; GRANT SELECT, UPDATE, DELETE ON shop.outbox_messages TO {relay};
		GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {relay};
		CREATE PUBLICATION walpost FOR TABLE shop.outbox_messages WITH (publish = 'insert', publish_via_partition_root = true);
		CREATE SCHEMA lair AUTHORIZATION {stranger}; GRANT ALL ON SCHEMA lair TO PUBLIC; GRANT USAGE, CREATE ON SCHEMA shop TO {stranger}`))
	r.exec(names.Replace(`SET ROLE {stranger}; CREATE TABLE lair.caught (who text, what text); GRANT ALL ON lair.caught TO PUBLIC;
		CREATE FUNCTION lair.spy() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN INSERT INTO lair.caught VALUES (current_user, ''a view''); RETURN true; END';
		CREATE FUNCTION lair.trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO lair.caught VALUES (current_user, ''a trigger''); RETURN NULL; END';
		RESET ROLE; CREATE TABLE shop.outbox_messages_dlq (LIKE public.outbox_messages_dlq INCLUDING ALL); ALTER TABLE shop.outbox_messages_dlq OWNER TO {stranger}; SET ROLE {stranger};
		CREATE TRIGGER spy AFTER INSERT ON shop.outbox_messages_dlq EXECUTE FUNCTION lair.trigger(); GRANT ALL ON shop.outbox_messages_dlq TO PUBLIC; RESET ROLE`))
	for _, name := range []string{"outbox_messages_archive", "outbox_replays", "outbox_sent", "outbox_known", "outbox_journal", "outbox_deferred"} {
		r.exec(names.Replace(`CREATE VIEW shop.` + name + ` AS SELECT t.* FROM public.` + name + ` t WHERE lair.spy(); ALTER VIEW shop.` + name + ` OWNER TO {stranger};
			GRANT ALL ON shop.` + name + ` TO PUBLIC; GRANT SELECT ON public.` + name + ` TO {stranger}`))
	}
	r.cfg.Outboxes[0].Schema = "shop"
	r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay_"+of+"@", 1)
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
	r.cfg.Retry, r.cfg.FallbackInterval = table.Retry{Backoff: 10 * time.Millisecond, MaxAttempts: 1}, 200*time.Millisecond
	return r, func() string {
		return r.query1(`SELECT coalesce((SELECT string_agg(DISTINCT concat_ws(' ', who, what), ', ') FROM lair.caught), '')`) +
			r.query1(`SELECT nullif(count(*), 0)::text FROM shop.outbox_messages_dlq`)
	}
}

// TestUntrustedTables: what a role makes by the names of walpost's tables is not used, wherever it is. None of its code runs,
// and no dead letter goes there.
func TestUntrustedTables(t *testing.T) {
	t.Parallel()
	t.Run("where walpost's are to be", func(t *testing.T) {
		t.Parallel()
		r, caught := untrusted(t)
		x := r.start()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), `walpost's tables in schema shop: `) || !strings.Contains(x.err.Error(), `outbox_messages_dlq: of role "stranger_`) {
			t.Errorf("the relay ended with %v", x.err)
		}
		if got := caught(); got != "<nil>" {
			t.Errorf("caught %s", got)
		}
	})
	t.Run("elsewhere", func(t *testing.T) {
		t.Parallel()
		r, caught := untrusted(t)
		r.cfg.Own.Schema = "public"
		r.start().streaming()
		r.exec(`INSERT INTO shop.outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{"n": 1}'), ('order', 2, 'payment.made', '{"n": 2}')`)
		eventually(t, "the row is a dead letter", func() bool { return r.query1(`SELECT count(*) FROM public.outbox_messages_dlq`) == "1" })
		eventually(t, "the other is stored", func() bool { return r.storedCount() == 1 })
		if got := caught(); got != "<nil>" {
			t.Errorf("caught %s", got)
		}
	})
}
