package table_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// newAppBench is a bench whose tables are in a schema of their own, which is on the role's search_path. On every table
// there are triggers of every kind, a CHECK constraint and an index, whose functions rely on that path.
func newAppBench(t *testing.T, pg *testenv.Postgres, mark outbox.Mark) *bench {
	t.Helper()
	b := &bench{t: t, url: pg.NewDB(t)}
	b.table = &outbox.Table{Schema: "app", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: mark}
	b.app = b.connect()
	b.exec(`CREATE SCHEMA app`)
	b.exec(fmt.Sprintf(`ALTER DATABASE %s SET search_path = app, public`, b.text(`SELECT current_database()`)))
	b.app = b.connect()
	b.migrate(b.url)
	b.exec(`
		CREATE TABLE audit (what text, op text);
		CREATE FUNCTION helper(what text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN what; END $$;
		CREATE FUNCTION fine(bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN helper('x') = 'x'; END $$;
		CREATE FUNCTION twin(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN helper($1); END $$;
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO audit VALUES (helper(regexp_replace(TG_TABLE_NAME, '_archive_.*', '_archive') || ' ' || TG_NAME), TG_OP);
			RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
		END $$;
		CREATE FUNCTION note_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO audit VALUES (helper(regexp_replace(TG_TABLE_NAME, '_archive_.*', '_archive') || ' ' || TG_NAME), TG_OP);
			RETURN NULL;
		END $$`)
	for _, box := range []string{"outbox_messages", "outbox_messages_dlq", "outbox_messages_archive", "outbox_replays", "outbox_sent", "idempotency_keys"} {
		number := "tenant_id"
		switch box {
		case table.Replays:
			number = "replay_id"
		case table.SentTable:
			number = "id"
		}
		b.exec(strings.NewReplacer("{table}", box, "{number}", number).Replace(`
			CREATE TRIGGER before_row BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION note();
			CREATE TRIGGER after_row AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION note();
			CREATE TRIGGER before_all BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION note_all();
			CREATE TRIGGER after_all AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION note_all();
			CREATE CONSTRAINT TRIGGER deferred AFTER INSERT OR UPDATE OR DELETE ON {table} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note();
			ALTER TABLE {table} ADD CHECK (fine({number}))`))
	}
	b.exec(`CREATE INDEX ON outbox_messages (twin(last_error)) WHERE processed_at IS NOT NULL;
		CREATE INDEX ON outbox_messages_dlq (twin(last_error)); CREATE INDEX ON outbox_messages_archive (twin(last_error))`)
	b.db = b.open()
	b.must(b.db.CheckTable(t.Context(), b.table))
	return b
}

func (b *bench) tryDLQ(f deadletter.Filter) *deadletter.Queue {
	q := b.dlq(b.table)
	b.must(q.Retry(b.t.Context(), f, false, func(o deadletter.Outcome) { b.must(o.Err) }))
	return q
}

// noted is what the triggers have noted of a table, and forgets it: the triggers of each kind of statement.
func (b *bench) noted(box string) (all []string) {
	b.t.Helper()
	rows, err := b.app.Query(b.t.Context(), `SELECT DISTINCT op || ' ' || split_part(what, ' ', 2) FROM audit WHERE what LIKE $1 || ' %' ORDER BY 1`, box)
	b.must(err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	b.must(err)
	b.exec(`DELETE FROM audit WHERE what LIKE $1 || ' %'`, box)
	return all
}

func (b *bench) wantNoted(box, op string) {
	b.t.Helper()
	want := []string{op + " after_all", op + " after_row", op + " before_all", op + " before_row", op + " deferred"}
	if got := b.noted(box); !slices.Equal(got, want) {
		b.t.Errorf("%s: triggers of %s that have run: %q, want %q", op, box, got, want)
	}
}

// TestTriggersHaveTheRolesPath: the statements' own names are pg_catalog's, and what triggers, constraints and indexes
// call is looked for where the role looks.
func TestTriggersHaveTheRolesPath(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppBench(t, pg, outbox.MarkUpdate)
		deleted := *b.table
		deleted.Mark = outbox.MarkDelete
		rows := b.insert(10)
		b.noted("outbox_messages")

		failed := func(r table.Row) table.Row {
			r.Failure, r.Polled = "uncovered: x", false
			return r
		}
		b.want(b.mark(rows[:1]), table.Done)
		b.wantNoted("outbox_messages", "UPDATE")
		v, err := b.db.Mark(t.Context(), &deleted, rows[1:2])
		b.must(err)
		b.want(v, table.Done)
		b.wantNoted("outbox_messages", "DELETE")
		v, err = b.db.Park(t.Context(), b.table, []table.Row{failed(rows[2])}, table.Retry{Backoff: time.Second, MaxAttempts: 5})
		b.must(err)
		b.want(v, table.Done)
		b.wantNoted("outbox_messages", "UPDATE")
		v, err = b.db.Hold(t.Context(), b.table, rows[3:4])
		b.must(err)
		b.want(v, table.Done)
		b.wantNoted("outbox_messages", "UPDATE")
		v, err = b.db.Park(t.Context(), b.table, []table.Row{failed(rows[4]), failed(rows[5])}, table.Retry{})
		b.must(err)
		b.want(v, table.Done, table.Done)
		b.wantNoted("outbox_messages", "DELETE")
		b.wantNoted("outbox_messages_dlq", "INSERT")

		q := b.tryDLQ(deadletter.Filter{Limit: 1})
		b.wantNoted("outbox_messages", "INSERT")
		b.wantNoted("outbox_messages_dlq", "DELETE")
		b.must(q.Discard(t.Context(), deadletter.Filter{}, false, func(o deadletter.Outcome) { b.must(o.Err) }))
		b.wantNoted("outbox_messages_dlq", "DELETE")

		lost, err := b.db.MarkedSince(t.Context(), b.table, time.Time{}, &table.MarkCursor{}, 10)
		b.must(err)
		pending, _, err := b.db.Unmark(t.Context(), b.table, lost)
		if err != nil || len(pending) != 1 {
			t.Errorf("%d rows are pending again, %v", len(pending), err)
		}
		b.wantNoted("outbox_messages", "UPDATE")
		skipped, err := b.skip(b.table, b.table)
		if err != nil || !slices.Equal(skipped, []int64{8, 0}) {
			t.Errorf("%d rows are skipped, %v", skipped, err)
		}
		b.wantNoted("outbox_messages", "UPDATE")
		b.noted(table.SentTable)
		b.must(b.db.NoteSent(t.Context(), table.Sent{Outbox: "other", Initial: "pending"}, true))
		if got := b.noted(table.SentTable); !slices.Contains(got, "INSERT deferred") || !slices.Contains(got, "INSERT before_row") {
			t.Errorf("INSERT into outbox_sent: triggers that have run: %q", got)
		}
		_, err = b.db.ForgetSent(t.Context(), "other")
		b.must(err)
		b.wantNoted(table.SentTable, "DELETE")

		b.exec(`UPDATE outbox_messages SET processed_at = now() - interval '2 hours', occurred_at = now() - interval '3 hours', last_error = NULL`)
		b.exec(`INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token, expires_at) VALUES (0, 's', 'k', '', gen_random_uuid(), now() - interval '1 hour')`)
		b.noted("outbox_messages")
		b.noted("idempotency_keys")
		if r := b.retain(); r.Tables[0].Archived != 8 || r.ExpiredKeys != 1 {
			t.Errorf("retention: %+v", r)
		}
		b.wantNoted("outbox_messages", "DELETE")
		b.wantNoted("outbox_messages_archive", "INSERT")
		b.wantNoted("idempotency_keys", "DELETE")
		archived, err := b.db.ArchivedSince(t.Context(), b.table, time.Time{}, &table.MarkCursor{}, 2)
		b.must(err)
		if n, err := b.db.Return(t.Context(), b.table, archived); err != nil || n != 2 {
			t.Errorf("%d rows have returned, %v", n, err)
		}
		b.wantNoted("outbox_messages_archive", "DELETE")
		b.wantNoted("outbox_messages", "INSERT")

		id, err := b.db.RequestReplay(t.Context(), &table.Replay{Slot: "s", Outbox: b.table.String()})
		b.must(err)
		b.wantNoted(table.Replays, "INSERT")
		ok, err := b.db.BeginReplay(t.Context(), id, table.ReplayCursor{Created: time.Now()})
		if b.must(err); !ok {
			t.Error("the replay does not begin")
		}
		b.wantNoted(table.Replays, "UPDATE")

		b.exec(`UPDATE outbox_messages_archive SET occurred_at = now() - interval '70 days'`) // into the default partition
		b.exec(`UPDATE outbox_messages SET occurred_at = now() - interval '70 days', processed_at = now() - interval '2 hours'`)
		b.noted("outbox_messages_archive")
		if r := b.retain(); len(r.Created) != 1 || r.Tables[0].Archived != 2 {
			t.Errorf("retention: %+v", r)
		}
		if got := b.noted("outbox_messages_archive"); !slices.Contains(got, "DELETE deferred") {
			t.Errorf("rows have left the default partition, and the triggers that have run are %q", got)
		}
	})
}

// TestIDsOfAnExtensionsType: their operators are in a schema that no statement looks at, or their owner may define
// the cast that an id goes through. A start says so.
func TestIDsOfAnExtensionsType(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TYPE tag;
		CREATE FUNCTION tag_in(cstring) RETURNS tag LANGUAGE internal IMMUTABLE STRICT AS 'textin';
		CREATE FUNCTION tag_out(tag) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
		CREATE TYPE tag (INPUT = tag_in, OUTPUT = tag_out, LIKE = text);
		CREATE FUNCTION tag_eq(tag, tag) RETURNS boolean LANGUAGE internal IMMUTABLE STRICT AS 'texteq';
		CREATE FUNCTION tag_cmp(tag, tag) RETURNS integer LANGUAGE internal IMMUTABLE STRICT AS 'bttextcmp';
		CREATE OPERATOR = (LEFTARG = tag, RIGHTARG = tag, FUNCTION = tag_eq);
		CREATE OPERATOR CLASS tag_ops DEFAULT FOR TYPE tag USING btree AS OPERATOR 3 =, FUNCTION 1 tag_cmp(tag, tag);
		CREATE TABLE tagged (id tag, event_type text, payload text, processed_at timestamptz);
		CREATE INDEX ON tagged (id);
		CREATE TYPE letter AS ENUM ('a'); CREATE DOMAIN letters AS letter; CREATE DOMAIN number AS bigint;
		CREATE TABLE lettered (LIKE tagged); ALTER TABLE lettered DROP id, ADD id letters PRIMARY KEY;
		CREATE TABLE numbered (LIKE tagged); ALTER TABLE numbered DROP id, ADD id number PRIMARY KEY`)
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload", "processed_at": "processed_at"})
	b.must(err)
	box := &outbox.Table{Schema: "public", Name: "tagged", Layout: layout, Mark: outbox.MarkUpdate}
	for name, refused := range map[string]string{"tagged": "have type public.tag", "lettered": "have type public.letters", "numbered": ""} {
		box.Name = name
		err := b.db.CheckTable(t.Context(), box)
		if refused != "" && (hint.CodeOf(err) != "table-id-index" || !strings.Contains(fmt.Sprint(err), refused)) || refused == "" && err != nil {
			t.Errorf("%v, want an error that says %q", err, refused)
		}
	}
}

// TestLaterStatementsNameTheCatalogs: a statement that changes rows gives their triggers the role's own search_path. The
// next one of its transaction looks for its names in pg_catalog alone, as the first did.
func TestLaterStatementsNameTheCatalogs(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.addDeadLetter("7", "1")
	b.addDeadLetter("8", "2")
	b.exec(`UPDATE outbox_messages_dlq SET original = (original::jsonb - 'trace_id')::json WHERE row_id = '8'`) // not in one statement with 7
	b.exec(`CREATE TABLE second_outbox (LIKE outbox_messages INCLUDING ALL)`)
	traps := testenv.SetTraps(t, b.url)
	defer traps.Check(t)
	b.url = traps.URL()
	if done, left := b.retry(b.dlq(b.table), deadletter.Filter{}); len(done) != 2 {
		t.Errorf("retried %v, left %v", done, left)
	}
	first, second := *b.table, *b.table
	first.Mark, second.Mark, second.Name = outbox.MarkUpdate, outbox.MarkUpdate, "second_outbox"
	_, err := b.skip(&first, &second)
	b.must(err)
}
