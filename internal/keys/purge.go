// Package keys has the statement that deletes expired idempotency keys. Retention runs it in a relay, package
// idempotency in an application without one.
package keys

import "strings"

// Table is the table that `walpost migrate` creates.
const Table = "idempotency_keys"

// purgeSQL deletes one batch: the keys that expired before $1, from $2 on, at most $3, oldest first. It
// returns how many it found, the expiry of the last, and how many it deleted. A request that is being
// executed keeps its key: its lease runs, or its transaction holds the row's lock. The DELETE repeats the
// condition, because rows of two partitions may have the same ctid.
const purgeSQL = `
WITH old AS MATERIALIZED (
	SELECT t.ctid AS place, t.expires_at AS at FROM {table} t
	WHERE t.expires_at < $1::timestamptz AND t.expires_at >= $2::timestamptz
		AND (t.lease_until IS NULL OR t.lease_until <= $1::timestamptz)
	ORDER BY t.expires_at LIMIT $3 FOR UPDATE SKIP LOCKED
), gone AS (
	DELETE FROM {table} t
	WHERE t.ctid = ANY (ARRAY(SELECT o.place FROM old o)) AND t.expires_at < $1::timestamptz RETURNING 1
)
SELECT (SELECT count(*) FROM old), (SELECT max(at)::timestamptz FROM old), (SELECT count(*) FROM gone)
WHERE {condition}`

// PurgeSQL is the statement for a table, whose name is quoted. condition is part of the outermost WHERE,
// which is evaluated before any row is deleted.
func PurgeSQL(table, condition string) string {
	return strings.NewReplacer("{table}", table, "{condition}", condition).Replace(purgeSQL)
}
