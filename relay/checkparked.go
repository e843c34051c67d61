package relay

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// parkedReasons is how many reasons are told, each cut to so many characters.
	parkedReasons     = 3
	parkedReasonChars = 200
	// parkedLooked is how many aggregates are looked at for them.
	parkedLooked = 100
)

// countParked warns of rows that failed and wait, and of those behind them, with the first failure of each
// class.
func (x *checker) countParked(ctx context.Context, t *outbox.Table) (f check.Findings) {
	if !slices.Contains(x.tables, t) || !t.Layout.Records() {
		return nil
	}
	parked, held, err := x.db.RecordedCount(ctx, t, letterLimit+1)
	if err != nil || parked == 0 {
		f.Failed(check.Warn, "table-unreadable", err)
		return f
	}
	waiting, _, _, err := x.db.Waiting(ctx, t, letterLimit, parkedLooked)
	f.Failed(check.Warn, "table-unreadable", err)
	more := ""
	if held > 0 {
		more = fmt.Sprintf(", and %s held behind", atMost(held, letterLimit, "is", "are"))
	}
	reasons := reasonsOf(waiting)
	if len(reasons) > 0 {
		more += ": " + strings.Join(reasons, "; ")
	}
	f.Warning("table-parked", "`walpost dlq list --parked` shows them; "+curesOf(reasons),
		"outbox %s: %s parked%s", t, atMost(parked, letterLimit, "row is", "rows are"), more)
	return f
}

// reasonsOf are the failures of parked rows, one of each class.
func reasonsOf(waiting []table.Waiting) (reasons []string) {
	seen := map[string]bool{}
	for _, w := range waiting {
		class := deadletter.Class(w.Error)
		if w.ParkedID == nil || w.Error == "" || seen[class] || len(reasons) == parkedReasons {
			continue
		}
		seen[class] = true
		reasons = append(reasons, fmt.Sprintf("%.*s", parkedReasonChars, w.Error))
	}
	return reasons
}

// curesOf says what helps against each of the reasons. Rows of some classes fail until they are dead letters.
func curesOf(reasons []string) string {
	const usual = "remove the cause, and they are delivered"
	var cures []string
	for _, reason := range reasons {
		class := deadletter.Class(reason)
		if cure := deadletter.Cure(class); cure != "" {
			cures = append(cures, class+": "+cure+" when it is a dead letter")
		} else {
			cures = append(cures, class+": "+usual)
		}
	}
	if len(cures) == 0 {
		return usual
	}
	return strings.Join(cures, "; ")
}
