package relay_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestStoppedBetweenHalves: one row breaks the statement that marks many, which is
// then tried in halves. A relay that is stopped when one half is marked tries the
// other once more, and not both.
func TestStoppedBetweenHalves(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.exec(`CREATE SEQUENCE minded; CREATE FUNCTION mind() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.payload ->> 'n' = '1' THEN PERFORM nextval('minded'), pg_sleep(0.5); END IF;
			IF NEW.payload ->> 'n' = '9' THEN RAISE 'not this one'; END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER mind BEFORE UPDATE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION mind()`)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', g) FROM generate_series(1, 10) g`)
	// Where the first statement has come before all of the rows were stored, there is no second one with the first row.
	eventually(t, "the first half is being marked", func() bool {
		return r.query1(`SELECT last_value = 2 OR (SELECT processed_at IS NOT NULL FROM outbox_messages WHERE payload ->> 'n' = '1') FROM minded`) == "true"
	})
	x.halt()
	left := r.query1(`SELECT string_agg(payload ->> 'n', ' ' ORDER BY id) FROM outbox_messages WHERE processed_at IS NULL`)
	if left != "9" && (len(left) < len("9 10") || !strings.HasSuffix("2 3 4 5 6 7 8 9 10", left)) {
		t.Errorf("rows %s are not marked", left)
	}
	r.exec(`DROP TRIGGER mind ON outbox_messages`)
	r.start()
	r.pending(0)
	if n := r.storedCount(); n != 10 {
		t.Errorf("%d messages, want 10", n)
	}
}
