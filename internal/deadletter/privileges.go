package deadletter

import (
	"context"
	"fmt"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// need is what a role needs on a table, which is quoted.
type need struct{ table, privileges string }

// letters is a need on the dead letters.
func (q *Queue) letters(privileges string) need { return need{q.table, privileges} }

// retryNeeds are those on the tables that rows go back to.
func (q *Queue) retryNeeds(ctx context.Context) (all []need) {
	for _, t := range q.cfg.Outboxes {
		onTable := "SELECT, INSERT"
		if t.Layout.States[outbox.Dead] != "" {
			onTable += ", UPDATE"
		}
		all = append(all, need{t.SQL(), onTable})
		if !table.Journals(t) {
			continue
		}
		journal, err := table.FindJournal(ctx, q.conn, q.cfg.Own)
		if err != nil {
			continue
		}
		for i, name := range []string{journal.Entries, journal.Deferred, journal.Known} {
			all = append(all, need{name, table.JournalPrivileges[i].Privileges})
		}
	}
	return all
}

// lackingSQL lists those of the privileges $2 on table $1 that the role lacks.
const lackingSQL = `SELECT coalesce(string_agg(p, ', '), '') FROM unnest(string_to_array($2, ', ')) p
	WHERE NOT has_table_privilege(to_regclass($1), p)
		AND NOT (p = 'UPDATE' AND has_any_column_privilege(to_regclass($1), p))`

// explain adds what failed and, where the role lacks privileges, the grants of all that are missing.
func (q *Queue) explain(ctx context.Context, err error, doing string, needs ...need) error {
	if err == nil {
		return nil
	}
	var grants []string
	for _, n := range append([]need{q.letters("SELECT")}, needs...) {
		var lacking string
		if q.conn.QueryRow(ctx, lackingSQL, n.table, n.privileges).Scan(&lacking) == nil && lacking != "" {
			grants = append(grants, fmt.Sprintf("GRANT %s ON %s TO %s",
				lacking, n.table, outbox.QuoteIdent(q.conn.Config().User)))
		}
	}
	return table.ExplainLetters(fmt.Errorf("%s: %w", doing, err), grants...)
}
