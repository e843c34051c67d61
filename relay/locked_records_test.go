package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestRecordIsLocked: another session locks what a mark or a record changes. With each mark the alarm names the
// row and the holder, what is not locked goes on, and the alarm ends with the lock.
func TestRecordIsLocked(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		const (
			parked   = `SELECT FROM outbox_messages WHERE last_error IS NOT NULL FOR UPDATE`
			deferral = `SELECT FROM outbox_deferred FOR UPDATE`
		)
		for _, c := range testenv.Some(t, 4, []struct {
			name, lock string
			mark       outbox.Mark
			holds      string // what the holder has, where it is no lock of the row alone
			others     bool   // go on
			dies       bool   // the row that fails
		}{
			{"row, update", parked, outbox.MarkUpdate, "", true, false},
			{"row, delete", parked, outbox.MarkDelete, "", true, false},
			{"deferral, journal", deferral, outbox.MarkJournal, "", true, false},
			{"outbox, update", `LOCK TABLE outbox_messages`, outbox.MarkUpdate, "AccessExclusiveLock on public.outbox_messages", false, false},
			{"deferrals, journal", `LOCK TABLE outbox_deferred`, outbox.MarkJournal, "AccessExclusiveLock on public.outbox_deferred", false, false},
			{"entries, journal", `LOCK TABLE outbox_journal IN SHARE MODE`, outbox.MarkJournal, "ShareLock on public.outbox_journal", false, false},
			{"progress, journal", `SELECT FROM outbox_known FOR UPDATE`, outbox.MarkJournal, "RowShareLock on public.outbox_known", true, false},
			{"dead letters, journal", `LOCK TABLE outbox_messages_dlq`, outbox.MarkJournal, "AccessExclusiveLock on public.outbox_messages_dlq", true, true},
		}...) {
			t.Run(c.name, func(t *testing.T) { // one after the other: while a transaction is open no slot can be created
				r := newRig(t, pg)
				if c.mark == outbox.MarkJournal && !marksInJournal {
					r.journal()
				}
				r.cfg.Outboxes[0].Mark = c.mark
				r.cfg.FallbackInterval = 200 * time.Millisecond
				r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1000}
				x := r.start().streaming()
				holder := r.conn()
				lock := func() {
					eventually(t, "the lock is taken", func() bool {
						_, err := holder.Exec(t.Context(), `BEGIN`)
						r.must(err)
						tag, err := holder.Exec(t.Context(), c.lock)
						r.must(err)
						if strings.HasPrefix(c.lock, "LOCK") || tag.RowsAffected() > 0 {
							return true
						}
						_, err = holder.Exec(t.Context(), `ROLLBACK`)
						r.must(err)
						return false
					})
				}
				if c.dies {
					r.cfg.Retry.MaxAttempts = 1
					x.halt()
					x = r.start().streaming()
					lock()
				}
				r.exec(set{"event_type": `'order placed'`, "aggregate_id": "1"}.insert("outbox_messages", 1, canonicalRow))
				if !c.dies {
					eventually(t, "the row is parked", func() bool { return r.count(`SELECT count(*) FROM outbox_messages WHERE attempts > 0`) == 1 })
					lock()
				}
				written := make(chan error, 1)
				writer := r.conn()
				go func() { // it may wait for the lock, too
					_, err := writer.Exec(t.Context(), set{"aggregate_id": "2"}.insert("outbox_messages", 2, canonicalRow))
					written <- err
				}()
				if c.others {
					r.must(<-written)
					r.pending(0)
				}
				a := x.alarmed("row_locked")
				who := fmt.Sprint(a["holder"])
				if pid := fmt.Sprintf("pid %d,", holder.PgConn().PID()); !strings.HasPrefix(who, pid) || !strings.HasSuffix(who, c.holds) {
					t.Errorf("the alarm names %q, want %s and %q: %v", who, pid, c.holds, a)
				}
				if row := fmt.Sprint(a["row"]); c.holds == "" && (strings.Contains(who, "; it has ") || !strings.HasPrefix(row+"/", "public.outbox_messages/1/")) {
					t.Errorf("the alarm names the row %q and %q", row, who)
				}
				after := r.here()
				r.must(run(t.Context(), holder, "ROLLBACK"))
				if !c.others {
					r.must(<-written)
				}
				eventually(t, "every alarm is over", func() bool {
					return x.logs.FilterFieldKey("alarm_over").Len() > 0
				})
				r.passes(after)
				x.quiet("row_unsettled", "missed_rows", "events_lost")
			})
		}
	})
}
