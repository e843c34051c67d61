package fallback

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/walpost/walpost/outbox"
)

// Kept begins the last_error of a dead row that stays in its outbox because it is too
// large to be moved. It has a dead letter, is not tried again, and holds no other row.
const Kept = "kept: "

// keptNote follows the failure in the dead letter of such a row.
const keptNote = "; the row is too large to be moved, and is still in its outbox"

// OmittedKey is the key under which a dead letter's original names the columns that it
// lacks. No retry can put such a row back.
const OmittedKey = "walpost:omitted"

// KeptKey is the key under which it names the transaction that has written the row, where
// that stays in its outbox.
const KeptKey = "walpost:kept"

const (
	// mostMoved is the longest value, in bytes, of a row that is moved to the dead letters.
	// The server copies what it moves a dozen times: with 250 MB it takes gigabytes of
	// memory and a minute.
	mostMoved = 16 << 20
	// shownSize is the stored size up to which a value is part of a kept row's dead letter,
	// in bytes. Of a payload it is less: 2,000 bytes of compressed jsonb may be a gigabyte of digits.
	shownSize    = 2000
	shownPayload = 64
)

// bury moves rows to the dead letters, and keeps those that cannot be moved.
func (db *DB) bury(ctx context.Context, t *outbox.Table, rows []Row) ([]Verdict, error) {
	if !slices.ContainsFunc(rows, func(r Row) bool { return r.large() }) {
		verdicts, err := db.record(ctx, t, rows, burySQL(t, db.own.deadLetters))
		if !tooLarge(err) {
			return verdicts, err
		}
	}
	if len(rows) > 1 {
		return inHalves(rows, func(half []Row) ([]Verdict, error) { return db.bury(ctx, t, half) })
	}
	verdicts, err := db.record(ctx, t, rows, keepSQL(t, db.own.deadLetters, t.Layout.Records()))
	if Code(err) == "54000" { // it takes no record
		return db.record(ctx, t, rows, keepSQL(t, db.own.deadLetters, false))
	}
	return verdicts, err
}

// tooLarge reports whether the server has failed at rows because of their size: a limit of
// 1 GB, memory, or time.
func tooLarge(err error) bool {
	return slices.Contains([]string{"54000", "XX000", "53200", "57014"}, Code(err))
}

// overLimit reports whether the server has met a value that is longer than it can handle, 1 GB.
// Memory and time are no proof of that: they may be the server's trouble.
func overLimit(err error) bool {
	code := Code(err)
	return code == "54000" || code == "XX000" && strings.Contains(err.Error(), "invalid memory alloc request size")
}

// keepSQL notes in a row that it is dead and stays where it is, and writes a dead letter
// that names it, once. A row that takes no record stays pending: see unkeptSQL.
func keepSQL(t *outbox.Table, letters string, records bool) string {
	returning := "t." + t.Column(outbox.ID) + " AS id, " + shownSQL(t) + " AS original"
	same := sameSQL(t) + " AND " + unkeptSQL(t, letters)
	change := fmt.Sprintf(`SELECT %s FROM %s t WHERE %s`, returning, t.SQL(), freeSQL(t))
	if records {
		same = sameSQL(t) + eligibleSQL(t) + fmt.Sprintf(" AND (left(t.%s, %d) = '%s') IS NOT TRUE", t.Column(outbox.LastError), len(Kept), Kept)
		change = fmt.Sprintf(`UPDATE %s t SET %s = %s || (SELECT f.failure FROM free f WHERE f.id = t.%s LIMIT 1), %s = 'infinity' WHERE %s RETURNING %s`,
			t.SQL(), t.Column(outbox.LastError), quoteLiteral(Kept), t.Column(outbox.ID), t.Column(outbox.AvailableAt), freeSQL(t), returning)
	}
	return settleSQL(t, same, change, fmt.Sprintf(`, letter AS MATERIALIZED (
	SELECT concat(c.id) AS row_id, c.original, (SELECT f.failure FROM free f WHERE f.id = c.id LIMIT 1) || %s AS failure FROM changed c
), buried AS (%s)`, quoteLiteral(keptNote), letterSQL(t, letters)))
}

// unkeptSQL is the condition under which no dead letter says that the row t stays in its outbox.
// An update, and another row with its id, is written by another transaction.
func unkeptSQL(t *outbox.Table, letters string) string {
	return fmt.Sprintf("(SELECT true FROM %s d WHERE d.outbox = %s AND d.row_id = concat(t.%s) AND d.original ->> '%s' = concat(t.xmin) LIMIT 1) IS NULL",
		letters, quoteLiteral(t.String()), t.Column(outbox.ID), KeptKey)
}

// shownSQL is the part of a row that its dead letter shows: its short mapped values, and
// the names of the columns that have others.
func shownSQL(t *outbox.Table) string {
	var pairs, long []string
	for f := outbox.ID; f < outbox.NumFields; f++ {
		if !t.Layout.Has(f) {
			continue
		}
		c, name, most := "t."+t.Column(f), quoteLiteral(t.Layout.Columns[f]), shownSize
		if f == outbox.Payload {
			most = shownPayload
		}
		pairs = append(pairs, fmt.Sprintf("%s, CASE WHEN pg_column_size(%s) <= %d THEN concat(%[2]s) END", name, c, most))
		long = append(long, fmt.Sprintf("CASE WHEN pg_column_size(%s) > %d THEN %s END", c, most, name))
	}
	return fmt.Sprintf("json_build_object(%s, '%s', array_remove(ARRAY[%s]::text[], NULL), '%s', concat(t.xmin))",
		strings.Join(pairs, ", "), OmittedKey, strings.Join(long, ", "), KeptKey)
}
