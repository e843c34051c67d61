package relay_test

import (
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestScanIsBrokenOff: a failover has brought back rows whose deletion was
// their mark, more of them than a step of the recovery scan holds, and the marking
// breaks off twice, the second time when more than such a step is marked again.
func TestScanIsBrokenOff(t *testing.T) {
	t.Parallel()
	const last = jetstream.U + 8000
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Outboxes = []*outbox.Table{{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkDelete}}
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = window })
	x := r.start().streaming()
	r.keep()
	x.halt()
	r.put(1, last)
	r.exec(`CREATE TABLE deleted AS TABLE outbox_messages`)
	x = r.start().streaming()
	r.pending(0)
	r.passes(r.here())
	x.halt()

	r.exec(`VACUUM (ANALYZE, TRUNCATE false) outbox_messages`) // the planner takes the pages for empty ones
	r.exec(`ALTER PUBLICATION walpost DROP TABLE outbox_messages`)
	r.exec(`INSERT INTO outbox_messages OVERRIDING SYSTEM VALUE SELECT * FROM deleted`)
	r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
	// A sequence counts on when the transaction is lost.
	r.exec(`CREATE SEQUENCE deletions;
		CREATE FUNCTION break_off() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('deletions') IN (5000, 22000) THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
			RETURN OLD;
		END $$;
		CREATE TRIGGER break_off BEFORE DELETE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION break_off()`)
	r.duplicateWindowPasses(window)
	r.rewind()
	x = r.start().streaming()
	r.pending(0)
	r.passes(r.here())
	if n := r.query1(`SELECT last_value FROM deletions`); n < "22000" || len(n) != 5 {
		t.Errorf("%s deletions, want more than 22000: the test shows nothing", n)
	}
	r.put(last+1, last+10)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, last+10)
	x.quietBut()
}
