package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
	"github.com/walpost/walpost/verify"
)

// archive moves the rows up to a number to the archive.
func (r *rig) archive(upTo int) {
	r.t.Helper()
	r.exec(`UPDATE outbox_messages SET processed_at = processed_at - interval '2 days' WHERE (payload ->> 'n')::int <= $1`, upTo)
	_, err := retention.Run(r.t.Context(), table.Config{URL: r.url, Settings: stream.Settings},
		retention.Options{Tables: r.cfg.Outboxes, ArchiveAfter: 24 * time.Hour})
	r.must(err)
	if n := r.count(`SELECT count(*) FROM outbox_messages_archive`); n != upTo {
		r.t.Fatalf("%d rows are archived, want %d", n, upTo)
	}
}

// TestVerifySparesADroppedFront: of rows whose messages were at the front that the
// stream has dropped nothing tells whether they were lost.
func TestVerifySparesADroppedFront(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.exec(`UPDATE outbox_messages SET processed_at = processed_at + CASE WHEN (payload ->> 'n')::int <= 50 THEN interval '-2 hours' ELSE interval '1 hour' END`)
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(t.Context(), jetstream.WithPurgeSequence(51)))
	r.loseMessages(70)
	for _, change := range []func(*verify.Config){
		func(*verify.Config) {},
		func(c *verify.Config) { c.Since = time.Now().Add(-24 * time.Hour) },
		repair,
	} {
		report := r.verify(change)
		r.finds(report, map[verify.Kind]int64{verify.Missing: 1})
		if report.Rows != 50 || !strings.Contains(fmt.Sprint(report.Notes), "before sequence 51") {
			t.Errorf("%d rows were compared, want 50: %v", report.Rows, report.Notes)
		}
	}
	if n := r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND payload ->> 'n' = '70'`); n != 1 || r.unmarked() != 1 {
		t.Errorf("%d rows are pending again, want the one that was lost", r.unmarked())
	}
}

// TestVerifyRepairsAnEmptiedStream: a stream that holds nothing says nothing of its
// front, also once the relay has begun to fill it again.
func TestVerifyRepairsAnEmptiedStream(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.cfg.FallbackInterval = 200 * time.Millisecond
	r.archive(50)
	x := r.start().streaming()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(t.Context()))
	report := r.verify(repair)
	r.finds(report, map[verify.Kind]int64{verify.Missing: 100})
	if report.Repaired != 100 || len(report.Notes) > 0 {
		t.Errorf("%d rows were repaired, want 100: %v", report.Repaired, report.Notes)
	}
	eventually(t, "all is marked", func() bool { return r.unmarked() == 0 })
	r.storedIs(1, 100)
	x.halt()
}

// TestVerifyRepairsTheArchiveFirst: no row may be pending before an archived one of
// its aggregate, also where that is archived at that very time.
func TestVerifyRepairsTheArchiveFirst(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.archive(50)
	r.loseMessages(10, 60, 70)
	r.exec(`CREATE TABLE repaired (at serial, n int)`)
	r.exec(`CREATE FUNCTION repaired() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO repaired (n) VALUES ((NEW.payload ->> 'n')::int);
		IF NEW.payload ->> 'n' = '10' THEN -- as retention does
			WITH gone AS (DELETE FROM outbox_messages WHERE payload ->> 'n' = '60' RETURNING *)
			INSERT INTO outbox_messages_archive (outbox, id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at, attempts, last_error, trace_id)
			SELECT 'public.outbox_messages', id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at, attempts, last_error, trace_id FROM gone;
		END IF;
		RETURN NULL; END $$`)
	r.exec(`CREATE TRIGGER repaired AFTER INSERT OR UPDATE ON outbox_messages FOR EACH ROW WHEN (NEW.processed_at IS NULL) EXECUTE FUNCTION repaired()`)
	report := r.verify(repair)
	r.finds(report, map[verify.Kind]int64{verify.Missing: 3})
	if got := r.query1(`SELECT string_agg(n::text, ' ' ORDER BY at) FROM repaired`); got != "10 70 60" || report.Repaired != 3 {
		t.Errorf("%d rows became pending as %q, want the archived one first, and the one that moved meanwhile, too", report.Repaired, got)
	}
	// Those that were in the archive all the time are counted once, although it is read twice. All were archived within a minute.
	if report.Rows < 100 || report.Rows > 150 {
		t.Errorf("%d rows were compared", report.Rows)
	}
}

// TestVerifyReportsWhatItRepaired: also where it breaks off.
func TestVerifyReportsWhatItRepaired(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.archive(50)
	r.loseMessages(10, 60)
	r.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$`)
	r.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
	report, err := r.tryVerify(repair)
	if err == nil || report == nil {
		t.Fatalf("report %+v, error %v", report, err)
	}
	if !report.Incomplete || report.Repaired != 1 || report.FirstSeq != 1 || report.LastSeq != 100 || !slices.Equal([]int64{report.Messages, report.Found[verify.Missing].Count}, []int64{98, 2}) {
		t.Errorf("report %+v", report)
	}
}

// TestVerifyFindsWhatNoSearchFinds: of rows that the progress has passed, and that have neither an entry nor a deferral, one is stored
// and has lost its entry, and the other ones are delivered by the repair.
func TestVerifyFindsWhatNoSearchFinds(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	if !marksInJournal {
		r.journal()
	}
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	r.cfg.FallbackInterval = 200 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 100)
	r.pending(0)
	r.passes(r.here())
	eventually(t, "the progress is at the last row", func() bool { return r.count(`SELECT coalesce(`+testenv.Settled+`, 0) FROM outbox_known`) == 100 })
	x.halt()
	r.loseMessages(3, 99, 100)
	r.exec(`UPDATE outbox_journal SET ids = ids - '{[3,4),[50,51),[99,101)}'`)
	r.duplicateWindowPasses(200 * time.Millisecond)
	for _, change := range []func(*verify.Config){
		func(*verify.Config) {},
		func(c *verify.Config) { c.Since = time.Now() },
	} {
		report := r.verify(change)
		r.finds(report, map[verify.Kind]int64{verify.Missing: 3})
		if notes := fmt.Sprint(report.Notes); !strings.Contains(notes, "row 50 is stored, and has no mark") {
			t.Errorf("the notes say nothing of row 50: %s", notes)
		}
	}
	if found := r.examine(); !strings.Contains(found, "warn table-overlooked") {
		t.Errorf("doctor finds %s", found)
	}
	x = r.start().streaming()
	if report := r.verify(repair); report.Repaired != 3 {
		t.Errorf("%d rows were repaired, want 3", report.Repaired)
	}
	eventually(t, "the rows are delivered", func() bool { return r.verify().Faults() == 0 })
	x.halt()
	seen := map[string]int{}
	for _, m := range r.stored() {
		seen[m.Header.Get("Nats-Msg-Id")]++
	}
	for id, n := range seen {
		if n > 1 {
			t.Errorf("%s is stored %d times", id, n)
		}
	}
	if len(seen) != 100 {
		t.Errorf("%d rows are stored, want 100", len(seen))
	}
}

// TestJournalIndexLacksEntries: verify and doctor say so, and how to mend it.
func TestJournalIndexLacksEntries(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	if !marksInJournal {
		r.journal()
	}
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	x.halt()
	ready := func(is bool) {
		r.exec(`UPDATE pg_index SET indisready = $1 FROM pg_class c
			WHERE indexrelid = c.oid AND relname LIKE 'outbox_journal%' AND relam = (SELECT oid FROM pg_am WHERE amname = 'gist')`, is)
	}
	ready(false)
	r.exec(`INSERT INTO outbox_journal (outbox, kind, ids) SELECT outbox, kind, '{[5,6)}' FROM outbox_journal LIMIT 1`)
	ready(true)
	if _, err := r.tryVerify(); err == nil || !strings.Contains(err.Error(), "lacks 1 of") || !strings.HasPrefix(hint.Of(err), "as its owner: REINDEX") {
		t.Errorf("%v, want that an entry is lacking, and a hint", err)
	}
	if found := r.examine(); !strings.Contains(found, "error table-journal-index") {
		t.Errorf("doctor finds %s", found)
	}
	r.exec(`REINDEX TABLE CONCURRENTLY outbox_journal`)
	r.finds(r.verify(), map[verify.Kind]int64{})
	if found := r.examine(); strings.Contains(found, "table-journal-index") {
		t.Errorf("doctor finds %s", found)
	}
}

// TestVerifyAfterRetention: messages of rows that retention has deleted are no faults.
func TestVerifyAfterRetention(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	if !marksInJournal {
		r.journal()
	}
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	x.halt()
	r.exec(`DELETE FROM outbox_messages WHERE id <= 4`)
	r.exec(`UPDATE outbox_journal SET ids = ids - '{[1,5)}'`)
	r.finds(r.verify(), map[verify.Kind]int64{verify.Unknown: 4})
	report := r.verify(func(c *verify.Config) { c.KeptFor = func(*outbox.Table) time.Duration { return time.Millisecond } })
	r.finds(report, map[verify.Kind]int64{})
	if notes := fmt.Sprint(report.Notes); !strings.Contains(notes, "4 messages are older than the rows that are kept") {
		t.Errorf("the notes are %s", notes)
	}
}
