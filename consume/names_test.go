package consume_test

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// A role that may create in public plants functions and operators with the names that the statements use.
// Each statement of a consumer runs beside them.
func TestPlantedNamesAreNotCalled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	traps := testenv.SetTraps(t, r.url)
	var healed atomic.Bool
	cfg := r.config()
	x := r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "3" && !healed.Load() {
			return errors.New("not now")
		}
		return effect(ctx, tx, e)
	})
	r.put(20, 5)
	r.waitFor(`SELECT count(*) FROM consumer_parked`, "4") // the third and those behind it
	r.waitFor(`SELECT max(attempts) > 1 FROM consumer_parked`, "true")
	healed.Store(true)
	r.effects(20)
	r.waitFor(`SELECT count(*) FROM consumer_parked`, "0")
	x.halt()
	cfg.Partitions, cfg.Filters = 3, []string{"events.order.>"}
	db, err := sql.Open("pgx", r.url)
	r.must(err)
	t.Cleanup(func() { _ = db.Close() })
	cfg.Pool, cfg.DB, cfg.Direct = nil, db, r.url
	r.put(5, 5)
	r.start(func(ctx context.Context) error {
		return consume.RunSQL(ctx, cfg, func(ctx context.Context, tx *sql.Tx, e consume.Event) error {
			_, err := tx.ExecContext(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
			return err
		})
	})
	r.effects(25)
	traps.Check(t)
}
