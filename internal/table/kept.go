package table

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// keptNote follows the failure in the dead letter of such a row.
const keptNote = "; the row cannot be moved, and is still in its outbox"

// OmittedKey is the key under which a dead letter's original names the columns that it
// lacks. No retry can put such a row back.
const OmittedKey = "walpost:omitted"

// KeptKey is the key under which it names the transaction that has written the row, where
// that stays in its outbox.
const KeptKey = "walpost:kept"

const (
	// mostMoved bounds what is moved to the dead letters at once, in bytes of text.
	// The server copies what it moves a dozen times: with 250 MB it takes gigabytes of
	// memory and a minute.
	mostMoved = 16 << 20
	// shownSize is the stored size up to which a value is part of a kept row's dead letter,
	// in bytes. Of a payload it is less: 2,000 bytes of compressed jsonb may be a gigabyte of digits.
	shownSize    = 2000
	shownPayload = 64
)

// moveToDeadLetters moves rows to the dead letters, and keeps those that cannot be moved. A statement moves
// so many bytes at most as one row may have.
func (rec *recorder) moveToDeadLetters(ctx context.Context, rows []Row) error {
	for len(rows) > 0 {
		n := slices.IndexFunc(rows, func(r Row) bool { return r.large() })
		if n == 0 {
			if err := rec.keep(ctx, rows[0]); err != nil {
				return err
			}
			rows = rows[1:]
			continue
		}
		if n < 0 {
			n = len(rows)
		}
		sql := MarkOf(rec.table).deadLetterSQL(rec.table, rec.db.own.deadLetters)
		err := rec.run(ctx, rows[:n], sql, func(row Row, err error) error {
			if !overLimit(err) { // it may be the row's fault, a trigger's, or the server's trouble
				if stays, unknown := rec.db.cannotMove(ctx, rec.table, row.Ref.ID); unknown != nil || !stays {
					return err
				}
			}
			return rec.keep(ctx, row)
		})
		if err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// keep leaves a row where it is, and says so in a dead letter with as much of it as can be.
func (rec *recorder) keep(ctx context.Context, row Row) (err error) {
	// The server may be unable to render the row: then the letter has only the names of its columns.
	for _, original := range []string{shownSQL(rec.table), namedSQL(rec.table)} {
		sql := MarkOf(rec.table).keepSQL(rec.table, rec.db.own.deadLetters, original)
		err = rec.run(ctx, []Row{row}, sql, nil)
		if !isUnreadable(err) {
			break
		}
	}
	return err
}

// cannotMove reports whether the row with this id is too large to be moved, or has a value that the
// server cannot render, whatever columns it has.
func (db *DB) cannotMove(ctx context.Context, t *outbox.Table, id string) (stays bool, err error) {
	var f tableFacts
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error { return f.readColumns(ctx, conn, t) })
	if err != nil {
		return false, err
	}
	size := "0::bigint"
	for name, typ := range f.types {
		length := renderedSQL("t."+outbox.QuoteIdent(name), isText(typ) || isJSON(typ))
		size += " + coalesce(" + length + ", 0)"
	}
	err = db.QueryRow(ctx, []any{&stays}, fmt.Sprintf(`SELECT coalesce((
			SELECT %s > %d FROM %s t WHERE t.%s = $1::text::%s LIMIT 1), false)`,
		size, mostMoved, t.SQL(), t.Column(outbox.ID), t.IDType), id)
	if isUnreadable(err) {
		return true, nil
	}
	return stays, err
}

// overLimit reports whether the server has met a value that is longer than it can handle, 1 GB.
// Memory and time are no proof of that: they may be the server's trouble.
func overLimit(err error) bool {
	code := pg.Code(err)
	return code == pgerrcode.ProgramLimitExceeded ||
		code == pgerrcode.InternalError && strings.Contains(err.Error(), "invalid memory alloc request size")
}

// mayBeLess reports whether a statement over fewer rows may succeed where this one met a limit of the
// server, of time, or of memory.
func mayBeLess(err error) bool {
	return overLimit(err) || TooLong(err) || pg.Code(err) == pgerrcode.OutOfMemory
}

// keepSQL implements Mark: it notes in a row that it is dead and stays where it is, and writes a dead letter
// that names it, once. Where the layout has no columns for that, it stays pending: see unkeptSQL.
func (inRow) keepSQL(t *outbox.Table, letters, original string) string {
	returning := "t." + t.Column(outbox.ID) + " AS id, " + original + " AS original"
	same := sameSQL(t) + " AND " + unkeptSQL(t, letters)
	change := fmt.Sprintf(`SELECT %s FROM %s t WHERE %s`, returning, t.SQL(), FreeSQL(t))
	if s := keptSets(t); s != "" {
		if same = sameSQL(t); t.Layout.Records() {
			same += eligibleSQL(t) + fmt.Sprintf(" AND (%s) IS NOT TRUE", keptIs(t, "t"))
		}
		change = fmt.Sprintf(`UPDATE %s t SET %s WHERE %s RETURNING %s`, t.SQL(), s, FreeSQL(t), returning)
	}
	return settleSQL(t, same, change, fmt.Sprintf(`, letter AS MATERIALIZED (
	SELECT concat(c.id) AS row_id, c.original,
		(SELECT f.failure FROM free f WHERE f.id = c.id LIMIT 1) || %s AS failure
	FROM changed c
), moved AS (%s)`, pg.QuoteLiteral(keptNote), letterSQL(t, letters)))
}

// keptSets are the assignments that say in a row that it is dead and stays, or "".
func keptSets(t *outbox.Table) string {
	s := sets{table: t}
	if s.state(outbox.Dead); len(s.all) == 0 && t.Layout.Records() {
		s.add(outbox.LastError, fmt.Sprintf("%s || (SELECT f.failure FROM free f WHERE f.id = t.%s LIMIT 1)",
			pg.QuoteLiteral(Kept), t.Column(outbox.ID)))
		s.add(outbox.AvailableAt, "'infinity'")
	}
	return s.sql()
}

// unkeptSQL is the condition under which no dead letter says that the row t stays in its outbox.
// An update, and another row with its id, is written by another transaction. Where the layout has columns
// for that, the row itself says so, and no letter is looked for.
func unkeptSQL(t *outbox.Table, letters string) string {
	if keptSets(t) != "" {
		return "true"
	}
	const none = "(SELECT true FROM %s d WHERE %s AND d.original ->> '%s' = concat(t.xmin) LIMIT 1) IS NULL"
	return fmt.Sprintf(none, letters, lettersOfSQL(t, "d", "concat(t."+t.Column(outbox.ID)+")"), KeptKey)
}

// shownSQL is the part of a row that its dead letter shows: its short mapped values, and
// the names of the columns that have others.
func shownSQL(t *outbox.Table) string {
	var pairs, long []string
	for f := outbox.ID; f < outbox.NumFields; f++ {
		if !t.Layout.Has(f) {
			continue
		}
		c, name, most := "t."+t.Column(f), pg.QuoteLiteral(t.Layout.Columns[f]), shownSize
		if f == outbox.Payload {
			most = shownPayload
		}
		pairs = append(pairs,
			fmt.Sprintf("%s, CASE WHEN pg_column_size(%s) <= %d THEN concat(%[2]s) END", name, c, most))
		long = append(long, fmt.Sprintf("CASE WHEN pg_column_size(%s) > %d THEN %s END", c, most, name))
	}
	return fmt.Sprintf(
		"json_build_object(%s, '%s', array_remove(ARRAY[%s]::text[], NULL), '%s', concat(t.xmin))",
		strings.Join(pairs, ", "), OmittedKey, strings.Join(long, ", "), KeptKey)
}

// namedSQL is the part of a row that its dead letter shows where the server cannot render what it
// holds: its id, and the names of the other columns.
func namedSQL(t *outbox.Table) string {
	var names []string
	for f := outbox.ID + 1; f < outbox.NumFields; f++ {
		if t.Layout.Has(f) {
			names = append(names, pg.QuoteLiteral(t.Layout.Columns[f]))
		}
	}
	return fmt.Sprintf("json_build_object(%s, concat(t.%s), '%s', ARRAY[%s]::text[], '%s', concat(t.xmin))",
		pg.QuoteLiteral(t.Layout.Columns[outbox.ID]), t.Column(outbox.ID),
		OmittedKey, strings.Join(names, ", "), KeptKey)
}
