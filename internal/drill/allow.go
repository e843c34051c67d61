package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Setting is what a database says of itself: its own name, where it may be broken.
const Setting = "drill.allow"

// ErrNotAllowed means that the database does not say that it may be broken.
var ErrNotAllowed = errors.New("the database does not name itself in " + Setting)

// checkAllowed reads what ALTER DATABASE has set, and not the session's value: a URL can set that. The value
// is the database's name, so that a copy under another name is not meant.
func checkAllowed(ctx context.Context, db *table.DB) (database string, err error) {
	var settings []string
	err = db.QueryRow(ctx, []any{&database, &settings}, `SELECT current_database()::text, coalesce((
		SELECT s.setconfig FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
		WHERE d.datname = current_database() AND s.setrole = 0), '{}')`)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read %s: %w", Setting, err)
	}
	if slices.Contains(settings, Setting+"="+database) {
		return database, nil
	}
	err = ErrNotAllowed
	for _, s := range settings {
		if other, is := strings.CutPrefix(s, Setting+"="); is {
			err = fmt.Errorf("%w, it names %q", err, other)
		}
	}
	advice := fmt.Sprintf("if it is no production database, as a superuser: ALTER DATABASE %s SET %s = %s",
		outbox.QuoteIdent(database), Setting, pg.QuoteLiteral(database))
	return database, hint.Errorf(advice, "drill on database %q: %w", database, err)
}
