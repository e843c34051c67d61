package table

import (
	"context"
	"fmt"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// Ages says which of retention's ages are on, and whether only others than the relay make its passes.
type Ages struct{ Archive, Delete, ByOthers bool }

// GrowthFindings say where delivered rows stay for ever: nothing is to take them away, or the role may not
// drop the partitions that they are in.
func (db *DB) GrowthFindings(ctx context.Context, t *outbox.Table, ages Ages) (f check.Findings, err error) {
	leaves := ages.Delete || ages.Archive && IsArchived(t)
	if !MarkOf(t).Stays() {
		return nil, nil
	}
	if !leaves {
		key, than := "retention.delete_after", "2160h (90 days)"
		if IsArchived(t) {
			key, than = "retention.archive_after", "168h (7 days)"
		}
		f.Note("table-grows", fmt.Sprintf("set %s, such as to %s, unless you need the rows", key, than),
			"delivered rows of %s stay for ever: %s is 0s", t, key)
		return f, nil
	}
	var stuck bool
	err = db.QueryRow(ctx, []any{&stuck}, `SELECT relkind = 'p' AND NOT pg_has_role(relowner, 'USAGE')
		FROM pg_class WHERE oid = to_regclass($1)`, t.SQL())
	if err != nil {
		return nil, fmt.Errorf("read the owner of %s: %w", t, err)
	}
	if stuck && Journals(t) && !ages.ByOthers {
		f.Failed(check.Warn, "table-grows", hint.Errorf(
			"run `walpost retention` with the owner's postgres.url each hour, and set retention.interval: 0s",
			"delivered rows of %s stay: only the owner of a partitioned table drops its partitions", t))
	}
	return f, nil
}
