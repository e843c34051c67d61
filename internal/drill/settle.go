package drill

import (
	"context"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// backlogRows is how many pending rows are waited for at once.
const backlogRows = 10_000

// settle waits until what is pending now is stored.
func (d *Drill) settle(ctx context.Context) error {
	d.cfg.Say("no more is written; waiting until everything is stored")
	limited, cancel := context.WithTimeout(ctx, d.cfg.Patience)
	defer cancel()
	var last error
	ask := func(do func(db *table.DB) (done bool, err error)) bool {
		for {
			done := false
			last = d.query(limited, func(db *table.DB) (err error) {
				done, err = do(db)
				return err
			})
			if done && last == nil {
				return true
			}
			if !sleep.For(limited, 200*time.Millisecond) {
				return false
			}
		}
	}
	d.report.Recovered = true
	for _, t := range d.cfg.Outboxes {
		d.report.Recovered = d.report.Recovered && ask(d.backlog(limited, t))
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !d.report.Recovered {
		d.note("not everything was stored within %s: `walpost status` shows what is pending, and who relays",
			d.cfg.Patience)
		if last != nil {
			d.note("the database does not answer: %v", last)
		}
	}
	return nil
}

// backlog returns a question that is answered with true when what it found first is settled.
func (d *Drill) backlog(ctx context.Context, t *outbox.Table) func(*table.DB) (bool, error) {
	var wanted map[string]bool
	full := false
	return func(db *table.DB) (bool, error) {
		fresh, err := db.Fresh(ctx, t, d.cfg.DelayThreshold, backlogRows)
		if err != nil {
			return false, err
		}
		left := map[string]bool{}
		for _, c := range fresh {
			if !c.Scheduled && !c.Early && (wanted == nil || wanted[c.ID]) {
				left[c.ID] = true
			}
		}
		if wanted == nil {
			full = len(fresh) == backlogRows
		}
		if wanted = left; len(left) == 0 && full {
			wanted, full = nil, false // there may be more of them
			return false, nil
		}
		return len(left) == 0, nil
	}
}
