package table

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// The rows that a settling statement is given: with all that may be recorded of them, or, where their content
// is known, with what tells it.
const (
	wantAll = `NULL AS key, w.failure, w.attempts, w.wait, w.lengths::int[] AS lengths
	FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::int[], $6::interval[], $7::text[])
		WITH ORDINALITY AS w(id, hash, xid, failure, attempts, wait, lengths, ord)`
	wantKnown = `NULL AS key, NULL AS failure, NULL AS wait
	FROM unnest($1::text[], $2::bigint[], $3::text[]) WITH ORDINALITY AS w(id, hash, xid, ord)`
	// wantKeyed lacks the type of the partition key.
	wantKeyed = `w.key::%s AS key, NULL AS failure, NULL AS wait
	FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])
		WITH ORDINALITY AS w(id, hash, xid, key, ord)`
)

// settling makes a settling statement of a table. The statement locks what is free, in id order, and changes
// it. Then it tells the rows that are left (still to be changed, so another session has locked them) from
// those that are not visible yet.
//
// The planner believes that few rows are pending, which is so whenever the
// statistics are made, and would compare each of them with each that is wanted.
// LATERAL with FOR UPDATE or LIMIT, ANY and NOT IN leave it no choice but to look
// up each id, once.
type settling struct {
	want string // wantAll, wantKnown or wantKeyed
	// same is the condition under which a row of the table t is to be changed for one of w.
	same string
	// change is the data-modifying command, over the CTE "free"(ord, id, key, place, at, failure, wait).
	// It returns id.
	change string
	more   string // nothing, or further CTEs, each after a comma
	gone   bool   // tells rows that are gone, too, and were told by the WAL
}

// settleSQL is a settling statement of pending rows.
func settleSQL(t *outbox.Table, same, change, more string) string {
	same = UnmarkedSQL(t, "t") + " AND " + same
	return settling{want: wantAll, same: same, change: change, more: more}.sql(t)
}

func (s settling) sql(t *outbox.Table) string {
	id, visible := t.Column(outbox.ID), "pg_visible_in_snapshot(xid::xid8, pg_current_snapshot())"
	left, verdict := "NOT "+visible, Invisible.sql()
	if s.gone {
		left = fmt.Sprintf("(NOT %s OR NOT EXISTS (SELECT FROM %s t WHERE t.%s = w.id OFFSET 0) AND %s)",
			visible, t.SQL(), id, BoundSQL(t))
		verdict = fmt.Sprintf("CASE WHEN %s AND %s THEN %s ELSE %s END",
			visible, presentSQL(t), Gone.sql(), verdict)
	}
	return strings.NewReplacer(
		"{table}", sourceOf(t).all("want"), "{free}", sourceOf(t).free, "{lock}", sourceOf(t).lock,
		"{same}", fmt.Sprintf("t.%s = w.id AND %s", id, s.same), "{change}", s.change,
		"{more}", s.more, "{want}", s.want, "{idtype}", "::"+t.IDType, "{own}", pg.OwnPath,
		"{locked}", Locked.sql(), "{verdict}", verdict, "{left}", left,
	).Replace(`
WITH want AS MATERIALIZED (
	SELECT w.ord::int, w.id{idtype} AS id, w.hash, w.xid, {want}
), free AS MATERIALIZED (
	SELECT w.ord, w.id, w.key, t.place, t.at, w.failure, w.wait FROM (SELECT * FROM want ORDER BY id) w,
		LATERAL (SELECT t.tableoid AS place, t.ctid AS at FROM {table} t
			WHERE {same}{free} {lock}) t
), changed AS ({change}){more}, rest AS MATERIALIZED (
	SELECT * FROM want w
	WHERE w.ord NOT IN (SELECT f.ord FROM free f WHERE (f.id IN (SELECT c.id FROM changed c)) IS TRUE)
)
SELECT ord, {locked} FROM rest w, LATERAL (SELECT FROM {table} t WHERE {same} LIMIT 1) t WHERE {own}
UNION ALL
SELECT ord, {verdict} FROM rest w WHERE {own} AND xid IS NOT NULL AND {left}`)
}

// storedSQL is the condition under which the row t has the content of w, which is known.
func storedSQL(t *outbox.Table) string { return t.HashSQL("t") + " = w.hash" }

// sameSQL is the condition under which the row t has the content of w. Where that is not known, the
// values that it lacks have the same lengths: another row that has the id by now may be a good one.
func sameSQL(t *outbox.Table) string {
	same := "true"
	for f := outbox.TenantID; f <= outbox.LastHeader; f++ {
		if t.Layout.Has(f) {
			c := "t." + t.Column(f)
			same += fmt.Sprintf(" AND CASE WHEN w.lengths[%d] IS NULL THEN true"+
				" WHEN w.lengths[%[1]d] = %d THEN pg_column_size(%s) > %d"+
				" ELSE w.lengths[%[1]d] = %[5]s END",
				f, outbox.MostText, c, leastOverLimit, lengthSQL(t, f))
		}
	}
	return fmt.Sprintf("CASE WHEN w.hash = %d THEN %s ELSE %s END", outbox.UnknownHash, same, storedSQL(t))
}

func (v Verdict) sql() string { return strconv.Itoa(int(v)) }

// markSQL also tells the rows that are gone: where all are marked, none is left to look for.
func markSQL(t *outbox.Table, command string) string {
	same, want := UnmarkedSQL(t, "t")+" AND "+storedSQL(t), wantKnown
	if t.PartitionKey != outbox.ID {
		same += fmt.Sprintf(" AND t.%s = w.key", t.Column(t.PartitionKey))
		want = fmt.Sprintf(wantKeyed, t.KeyType)
	}
	return settling{want: want, same: same, change: command, gone: true}.sql(t)
}

// takeSQL is the part of a marking command that names the rows t: "free" has them. With a partition key it is
// a join, which PostgreSQL can only make row by row, because no hash or merge join has ANY: so each row is
// looked for in its own partition. Without a key [FreeSQL] is quicker.
func takeSQL(t *outbox.Table, from string) string {
	if t.PartitionKey == outbox.ID {
		return "WHERE " + FreeSQL(t)
	}
	return fmt.Sprintf("%s free f WHERE t.%s = ANY (ARRAY[f.id]) AND t.%s = ANY (ARRAY[f.key])"+
		" AND t.tableoid = ANY (ARRAY[f.place]) AND t.ctid = ANY (ARRAY[f.at])",
		from, t.Column(outbox.ID), t.Column(t.PartitionKey))
}

func parkSQL(t *outbox.Table, backoff time.Duration) string {
	failure := fmt.Sprintf("(SELECT f.failure FROM free f WHERE f.id = t.%s LIMIT 1)", t.Column(outbox.ID))
	wait := fmt.Sprintf("(SELECT f.wait FROM free f WHERE f.id = t.%s LIMIT 1)", t.Column(outbox.ID))
	change := MarkOf(t).set(t, parkSets(t, failure, wait, backoff))
	return settleSQL(t, sameSQL(t)+eligibleSQL(t), change, "")
}

// eligibleSQL narrows the rows whose failure is recorded to those that are as they were
// read, or have no record where the WAL brought them.
func eligibleSQL(t *outbox.Table) string {
	return fmt.Sprintf(" AND (w.attempts IS NULL AND %s OR coalesce(t.%s, 0)::int = w.attempts)",
		unrecordedIs(t, "t"), t.Column(outbox.Attempts))
}

func holdSQL(t *outbox.Table) string {
	change := MarkOf(t).set(t, holdSets(t, heldNote))
	return settleSQL(t, sameSQL(t)+" AND "+unrecordedIs(t, "t"), change, "")
}
