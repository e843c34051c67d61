package migrations

import (
	"errors"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
)

// explain adds what the operator can do about an error.
func explain(err error) error {
	if err == nil || hint.Of(err) != "" {
		return err
	}
	return hint.Wrap(err, advise(err))
}

func advise(err error) string {
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) {
		return "check postgres.url (WALPOST_POSTGRES_URL, or the PG* variables), " +
			"and that PostgreSQL is up and lets this client in"
	}
	var refused *pgconn.PgError
	if !errors.As(err, &refused) {
		return ""
	}
	switch refused.Code {
	case pgerrcode.DuplicateTable:
		return "walpost did not create that table, and leaves it alone. If it is an outbox, describe it " +
			"with outboxes[].table and outboxes[].layout. If it came from `walpost migrate print`, it is " +
			"in the hands of the tool that applied it"
	case pgerrcode.UndefinedTable:
		return "restore the table. If all tables of that line of migrations are gone, drop their " +
			"record, too: DROP TABLE walpost_migrations_<line>, then run `walpost migrate up`"
	case pgerrcode.DuplicateFunction:
		return "walpost did not create that function, and leaves it alone: rename or drop it, " +
			"then run it again"
	case pgerrcode.DependentObjectsStillExist:
		return "first drop what depends on it (a view on a table, a trigger of another table " +
			"with the function), then run it again"
	case pgerrcode.InsufficientPrivilege:
		return "name a URL of the role that owns walpost's tables and has CREATE on the schema: " +
			"--postgres-url, or postgres.url"
	case pgerrcode.LockNotAvailable:
		return "another session holds a lock on the table: see pg_stat_activity and pg_locks, " +
			"then run it again"
	case pgerrcode.ReadOnlySQLTransaction:
		return "this server is a standby or read-only: point postgres.url at the primary"
	}
	return refused.Hint
}
