package table

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/testenv"
)

// TestIDsMeanwhile: rows are inserted and delivered between the look at the sequence and the look at the progress. The ids do not come
// again.
func TestIDsMeanwhile(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(testenv.SettledTo("public.outbox_events", 0, ""))
	other, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
	must(t, err)
	defer other.Close(t.Context()) //nolint:errcheck // the test is over
	_, err = other.Exec(t.Context(), `BEGIN; LOCK TABLE public.outbox_journal IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	looked := make(chan check.Findings, 1)
	go func() {
		_, problems, err := db.Inspect(t.Context(), table)
		if err != nil {
			t.Error(err)
		}
		looked <- problems
	}()
	for waits, until := false, time.Now().Add(testenv.Patience); !waits; time.Sleep(5 * time.Millisecond) {
		must(t, other.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'public.outbox_journal'::regclass)`).Scan(&waits))
		if time.Now().After(until) {
			t.Fatal("it does not wait")
		}
	}
	_, err = other.Exec(t.Context(), `INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 10) g;
		UPDATE public.outbox_known SET unsettled = '{[11,)}'; COMMIT`)
	must(t, err)
	for _, f := range <-looked {
		if f.Code == "table-ids-again" {
			t.Error(f.Text)
		}
	}
}
