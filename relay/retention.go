package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/sleep"
)

// Retention says what becomes of delivered rows; see [retention.Options].
type Retention struct {
	// ArchiveAfter, DeleteAfter and DropAfter count from when a row was processed; 0 is never.
	ArchiveAfter time.Duration
	DeleteAfter  time.Duration
	// ExcludedAfter counts from a row's occurred_at.
	ExcludedAfter time.Duration
	DropAfter     time.Duration
	// Interval is from the beginning of one pass to the next. 0: none is made.
	Interval time.Duration
}

const (
	// retainFirst is how long after its term began a relay makes the first pass:
	// there is more urgent work at a start.
	retainFirst = time.Minute
	// A complaint is made once in reportEvery, and the same one as before once in
	// reportAgain.
	reportEvery = time.Hour
	reportAgain = 24 * time.Hour
)

// complaint is the last report about passes of retention.
type complaint struct {
	text string
	at   time.Time
}

// retainer makes passes of retention in each term. The goroutine that start begins owns complained.
type retainer struct {
	*reporter
	*servers
	complained complaint
}

// start makes passes of retention, each on a connection of its own, until ctx is
// done or the term ends. A pass is broken off then. The next one, of this
// relay or another, goes on from there.
func (t *retainer) start(ctx, held context.Context) (done chan struct{}) {
	done = make(chan struct{})
	interval := t.cfg.Retention.Interval
	if interval <= 0 {
		close(done)
		return done
	}
	ctx, stop := context.WithCancel(ctx)
	unlink := context.AfterFunc(held, stop)
	go func() {
		defer close(done)
		defer stop()
		defer unlink()
		for wait := min(interval, retainFirst); sleep.For(ctx, wait); {
			began := time.Now()
			if t.pass(ctx) {
				wait = min(interval, retainFirst) // somebody else makes a pass
				continue
			}
			wait = interval - time.Since(began)
		}
	}()
	return done
}

// pass makes a pass and logs what it has done, if anything, and what kept it
// from doing more.
func (t *retainer) pass(ctx context.Context) (busy bool) {
	began := time.Now()
	report, err := retention.Run(ctx, t.database(), retention.Options{
		Tables:       t.outboxes,
		ArchiveAfter: t.cfg.Retention.ArchiveAfter, DropAfter: t.cfg.Retention.DropAfter,
		DeleteAfter: t.cfg.Retention.DeleteAfter, ExcludedAfter: t.cfg.Retention.ExcludedAfter,
	})
	if !report.Busy {
		t.metrics.kept.Set(float64(len(report.Kept)))
		t.status.keeping(report.Kept)
	}
	var archived, deleted int64
	for _, of := range report.Tables {
		archived, deleted = archived+of.Archived, deleted+of.Deleted
	}
	if archived+deleted+report.Purged+report.ExpiredKeys > 0 || len(report.Created)+len(report.Dropped) > 0 {
		t.log.Info("retention", zap.Int64("rows_archived", archived), zap.Int64("rows_deleted", deleted),
			zap.Strings("partitions_created", report.Created),
			zap.Strings("partitions_dropped", report.Dropped), zap.Any("partitions_kept", report.Kept),
			zap.Int64("old_rows_deleted", report.Purged),
			zap.Int64("expired_keys_deleted", report.ExpiredKeys),
			zap.Duration("took", time.Since(began).Round(time.Millisecond)))
	}
	if ctx.Err() == nil {
		t.report(report.Complaints(), err)
	}
	return report.Busy
}

// report says what a pass could not do.
func (t *retainer) report(notes []string, err error) {
	for _, e := range apart(err) {
		text := e.Error()
		if h := hint.Of(e); h != "" {
			text = fmt.Sprintf("%s (%s)", text, h)
		}
		notes = append(notes, text)
	}
	text, since := strings.Join(notes, "; "), time.Since(t.complained.at)
	if text == "" || !t.complained.at.IsZero() &&
		(since < reportEvery || text == t.complained.text && since < reportAgain) {
		return
	}
	t.complained = complaint{text, time.Now()}
	t.log.Warn("retention could not do all its work", zap.Strings("because", notes))
}

// apart are the errors that were joined.
func apart(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	if err == nil {
		return nil
	}
	return []error{err}
}
