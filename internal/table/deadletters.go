package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// DeadLetters is the table that dead letters of every outbox are moved to.
//
// Its column "original" holds the row, and `original ->> column` is the value's
// text exactly as the type's output function renders it, so that a retry puts
// back what was there: digits, the order of keys, infinity, an array's bounds.
const DeadLetters = "outbox_messages_dlq"

// deadLetterSQL implements Mark: it moves rows in the statement that deletes them. Where their status says
// that they are dead, they stay.
func (inRow) deadLetterSQL(t *outbox.Table, dead string) string {
	remove := fmt.Sprintf("DELETE FROM %s t", t.SQL())
	if t.Layout.States[outbox.Dead] != "" {
		s := sets{table: t}
		s.state(outbox.Dead)
		remove = fmt.Sprintf("UPDATE %s t SET %s", t.SQL(), s.sql())
	}
	remove += fmt.Sprintf(" WHERE %s RETURNING t.%s AS id, t AS original", FreeSQL(t), t.Column(outbox.ID))
	return settleSQL(t, sameSQL(t), remove, fmt.Sprintf(`, letter AS MATERIALIZED (
	SELECT concat(c.id) AS row_id, %s AS original,
		(SELECT f.failure FROM free f WHERE f.id = c.id LIMIT 1) AS failure
	FROM changed c
), moved AS (%s)`, originalSQL(t, "c.original"), letterSQL(t, dead)))
}

// originalSQL renders a row of the table as JSON, whatever columns it has by now.
// row_to_json would not do: a null document becomes a NULL, a timestamp gets a T,
// an array forgets that it begins at 7, and a \u0000 that the json type takes
// makes every look into the object fail; and it calls a cast to json that a type's owner may
// have defined, as ::text calls one to text. The record's text by concat() has each value as it
// is, in quotes where it needs them. A number, or a document without any \u, stays
// one, to be read with ease; any other value becomes a string.
func originalSQL(t *outbox.Table, row string) string {
	return strings.NewReplacer("{row}", row, "{table}", pg.QuoteLiteral(t.SQL())).Replace(`(
		SELECT ('{' || string_agg(to_json(f.name)::text || ':' || CASE
			WHEN f.field[1] = '' THEN 'null'
			WHEN f.type IN ('smallint', 'integer', 'bigint', 'numeric')
				AND v.text ~ '^-?[0-9]+([.][0-9]+)?$' THEN v.text
			WHEN f.type IN ('json', 'jsonb') AND v.text ~ '^[[{]' AND position('\u' IN v.text) = 0 THEN v.text
			ELSE to_json(v.text)::text END, ',' ORDER BY f.n) || '}')::json
		FROM ROWS FROM (
				unnest(ARRAY(SELECT a.attname::text FROM pg_attribute a
					WHERE a.attrelid = to_regclass({table}) AND a.attnum > 0 AND NOT a.attisdropped
					ORDER BY a.attnum)),
				unnest(ARRAY(SELECT a.atttypid::regtype::text FROM pg_attribute a
					WHERE a.attrelid = to_regclass({table}) AND a.attnum > 0 AND NOT a.attisdropped
					ORDER BY a.attnum)),
				regexp_matches(concat({row}), '[(,]("(?:[^"]|"")*"|[^",)]*)', 'g')
			) WITH ORDINALITY AS f(name, type, field, n),
			LATERAL (SELECT CASE WHEN left(f.field[1], 1) <> '"' THEN f.field[1]
				ELSE replace(replace(substr(f.field[1], 2, length(f.field[1]) - 2), '""', '"'), '\\', '\')
				END) AS v(text))`)
}

// lettersOfSQL is the condition that the dead letter named is one of the table's row whose id is the text in
// an expression. The table of dead letters has an index for it.
func lettersOfSQL(t *outbox.Table, named, id string) string {
	const same = "hashtextextended(%[1]s.row_id, 0) = hashtextextended(%[2]s, 0) AND %[1]s.row_id = %[2]s"
	return fmt.Sprintf(same+" AND %[1]s.outbox = %[3]s", named, id, pg.QuoteLiteral(t.String()))
}

// letterSQL inserts dead letters of a table from the CTE letter(row_id, original,
// failure). Their other columns are there to be read and searched: what is not
// mapped, or does not fit, stays NULL, and nothing in a row can make it fail.
func letterSQL(t *outbox.Table, dead string) string {
	columns, values := "", ""
	for _, f := range []outbox.Field{
		outbox.ID, outbox.TenantID, outbox.AggregateType, outbox.AggregateID,
		outbox.EventType, outbox.EventVersion, outbox.Payload,
		outbox.OccurredAt, outbox.AvailableAt, outbox.TraceID,
	} {
		if t.Layout.Has(f) {
			columns, values = columns+", "+f.String(), values+",\n\t\t"+fittingSQL(t, f)
		}
	}
	attempts := "1"
	if t.Layout.InJournal(outbox.Attempts) {
		attempts = "LEAST(coalesce(l.attempts, 0) + 1, 32767)"
	} else if t.Layout.Has(outbox.Attempts) {
		attempts = fmt.Sprintf("LEAST(coalesce(%s, 0) + 1, 32767)", fittingSQL(t, outbox.Attempts))
	}
	return fmt.Sprintf(`
	INSERT INTO %s (outbox, row_id, original, attempts, last_error%s)
	SELECT %s, l.row_id, l.original, %s, l.failure%s FROM letter l
`, dead, columns, pg.QuoteLiteral(t.String()), attempts, values)
}

// fittingSQL is a field's value in the type that its column has in the dead
// letters, or NULL. Of times and documents it is the table's type that decides,
// because no test of the text can promise that its cast succeeds.
func fittingSQL(t *outbox.Table, f outbox.Field) string {
	text := "(l.original ->> " + pg.QuoteLiteral(t.Layout.Columns[f]) + ")"
	typed := func(types, cast string) string {
		return fmt.Sprintf(`CASE WHEN (SELECT a.atttypid::regtype::text IN (%s) FROM pg_attribute a
			WHERE a.attrelid = to_regclass(%s) AND a.attname = %s) THEN %s::%s END`,
			types, pg.QuoteLiteral(t.SQL()), pg.QuoteLiteral(t.Layout.Columns[f]), text, cast)
	}
	whole := func(cast, least, most string) string {
		return fmt.Sprintf(`CASE WHEN %[1]s !~ '^-?[0-9]{1,19}$' THEN NULL
			WHEN %[1]s::numeric BETWEEN %[3]s AND %[4]s THEN %[1]s::%[2]s END`,
			text, cast, least, most)
	}
	switch f {
	case outbox.ID, outbox.TenantID, outbox.AggregateID:
		return whole("bigint", "-9223372036854775808", "9223372036854775807")
	case outbox.EventVersion, outbox.Attempts:
		return whole("smallint", "-32768", "32767")
	case outbox.Payload:
		return typed("'jsonb'", "jsonb")
	case outbox.OccurredAt, outbox.AvailableAt:
		return typed("'timestamp with time zone', 'timestamp without time zone'", "timestamptz")
	}
	return text
}

// DiedLately reports whether a row became a dead letter that the slot may still
// have the insert of: by a transaction that its catalog_xmin does not cover.
func (db *DB) DiedLately(ctx context.Context, slot string) (died bool, err error) {
	err = db.QueryRow(ctx, []any{&died}, `SELECT to_regclass($1) IS NOT NULL`, db.own.deadLetters)
	if err == nil && died {
		err = db.QueryRow(ctx, []any{&died}, `SELECT EXISTS (
			SELECT FROM `+db.own.deadLetters+` d, pg_replication_slots s
			WHERE s.slot_name = $1 AND s.database = current_database()
				AND age(d.xmin) <= age(s.catalog_xmin))`, slot)
	}
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		return true, nil // who may not look must take it for granted
	}
	if err != nil {
		return false, fmt.Errorf("look for dead letters: %w", err)
	}
	return died, nil
}

// DeadLetterCount counts the dead letters, up to a limit.
func (db *DB) DeadLetterCount(ctx context.Context, limit int) (n int, err error) {
	err = db.QueryRow(ctx, []any{&n},
		fmt.Sprintf(`SELECT count(*)::int FROM (SELECT FROM %s LIMIT %d) d`, db.own.deadLetters, limit))
	if err != nil {
		return 0, fmt.Errorf("count dead letters: %w", err)
	}
	return n, nil
}

// DeadLettersByOutbox counts the dead letters of each outbox, up to a limit in all.
func (db *DB) DeadLettersByOutbox(ctx context.Context, limit int) (map[string]int, error) {
	counts := map[string]int{}
	var name string
	var n int
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, fmt.Sprintf(`SELECT outbox, count(*)::int
			FROM (SELECT outbox FROM %s LIMIT %d) d GROUP BY outbox`, db.own.deadLetters, limit))
		_, err := pgx.ForEachRow(rows, []any{&name, &n}, func() error {
			counts[name] = n
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count dead letters: %w", err)
	}
	return counts, nil
}

// ExplainLetters adds a hint for a role that works with dead letters. grants are what it lacks.
func ExplainLetters(err error, grants ...string) error {
	switch pg.Code(err) {
	case pgerrcode.UndefinedTable:
		return hint.Wrap(err, "run `walpost migrate up`")
	case pgerrcode.InsufficientPrivilege:
		if len(grants) == 0 { // the error names something else, such as what a trigger calls
			return err
		}
		return hint.Wrap(err, "use the owner's postgres.url, or as the tables' owner: "+
			strings.Join(grants, "; "))
	case pgerrcode.LockNotAvailable:
		return hint.Wrap(err, "another session holds a lock for long: "+
			"end its transaction; then run this again, it goes on where it was")
	case pgerrcode.ReadOnlySQLTransaction:
		return hint.Wrap(err,
			"postgres.url leads to a standby, or to a role that only reads: give it the primary")
	}
	return err
}
