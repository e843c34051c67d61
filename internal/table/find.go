package table

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Place is where a row is.
type Place uint8

const (
	// Nowhere: it is in none of these, or another row has its id.
	Nowhere Place = iota
	// Pending: in its outbox, and not marked.
	Pending
	// Marked: in its outbox.
	Marked
	// Archived: in the archive. Only marked rows are.
	Archived
	// Dead: there is a dead letter of its id. What it said is not compared.
	Dead
)

// Finding is where a row was found, and the key of its aggregate where that is
// known.
type Finding struct {
	Place     Place
	Aggregate outbox.AggregateKey
}

// Find looks for rows of one table, whatever became of them: in the outbox, then in
// the archive, then among the dead letters. A row that moves meanwhile, in this
// direction, is not missed.
func (db *DB) Find(ctx context.Context, t *outbox.Table, refs []outbox.Ref) ([]Finding, error) {
	return db.FindValues(ctx, t, refs, nil)
}

// FindValues is Find. see, if set, is called with the values of each row that is in the outbox or the
// archive, except its payload, and its place among refs. They are valid until it returns. It may be called
// again for a row.
func (db *DB) FindValues(
	ctx context.Context, t *outbox.Table, refs []outbox.Ref, see func(n int, ev *outbox.Event),
) ([]Finding, error) {
	found := make([]Finding, len(refs))
	all := make([]int, len(refs))
	for i := range refs {
		all[i] = i
	}
	byID := byIDSQL(t, sourceOf(t).all(givenIDs), "")
	inOutbox := fmt.Sprintf(`JOIN %s ON %s = w.hash`, byID, t.HashSQL("t"))
	inOutbox += " AND NOT " + DeadSQL(t, "t", givenIDs)
	left, err := db.findIn(ctx, t, inOutbox, nameSQL(t), PendingSQL(t, "t"), refs, all, found, Marked, see)
	if err != nil {
		return nil, err
	}
	if IsArchived(t) && len(left) > 0 {
		own := fmt.Sprintf("t.outbox = %s AND ", pg.QuoteLiteral(t.String()))
		inArchive := fmt.Sprintf(`JOIN %s ON %s = w.hash`, byIDSQL(t, db.own.archive, own), t.HashSQL("t"))
		left, err = db.findIn(ctx, t, inArchive, nameSQL(t), "NULL", refs, left, found, Archived, see)
		if err != nil && !lacksArchive(err) {
			return nil, err
		}
	}
	if len(left) > 0 {
		amongDead := fmt.Sprintf(`JOIN LATERAL (
			SELECT FROM %s t WHERE %s LIMIT 1) t ON true`,
			db.own.deadLetters, lettersOfSQL(t, "t", "w.id"))
		_, err = db.findIn(ctx, t, amongDead, "NULL", "NULL", refs, left, found, Dead, nil)
		if err != nil && pg.Code(err) != pgerrcode.UndefinedTable {
			return nil, err
		}
	}
	return found, nil
}

// Archive is the table that delivered rows of every outbox move to.
const Archive = "outbox_messages_archive"

// IsArchived reports whether the outbox's rows come to the archive, which has the
// canonical columns.
func IsArchived(t *outbox.Table) bool {
	l := t.Layout
	l.SetHeaders(nil) // an archive that has these columns, too, takes the rows
	return MarkOf(t).Stays() && l.Columns == outbox.Canonical().Columns
}

// findIn looks for those of refs that left names, and returns those that are not
// there. An id that the type cannot hold is nowhere.
func (db *DB) findIn(
	ctx context.Context, t *outbox.Table, join, aggregate, pending string,
	refs []outbox.Ref, left []int, found []Finding, place Place, see func(n int, ev *outbox.Event),
) ([]int, error) {
	var fields []outbox.Field
	if see != nil {
		fields = attributesOf(t)
	}
	values, lengths := attributesSQL(t, fields)
	sql := fmt.Sprintf(`SELECT w.ord, %s, %s%s
		FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS w(id, hash, ord) %s %s`,
		aggregate, pending, values, join, lengths)
	err := portions[int]{
		size: &db.portion,
		do: func(some []int) error {
			ids, hashes := make([]string, len(some)), make([]int64, len(some))
			for i, n := range some {
				ids[i], hashes[i] = refs[n].ID, int64(refs[n].Hash)
			}
			return db.QueryText(ctx, sql, []any{ids, hashes}, func(v [][]byte) error {
				ord, err := strconv.Atoi(string(v[0]))
				if err != nil {
					return err
				}
				f := &found[some[ord-1]]
				if f.Place = place; string(v[2]) == "t" {
					f.Place = Pending
				}
				f.Aggregate = outbox.KeyOfAggregateName(v[1])
				if see != nil {
					ev := eventOf(t, fields, v[3:])
					see(some[ord-1], &ev)
				}
				return nil
			})
		},
		alone: func(int, error) error { return nil },
	}.run(left)
	if err != nil {
		return left, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	var still []int
	for _, n := range left {
		if found[n].Place == Nowhere {
			still = append(still, n)
		}
	}
	return still, nil
}

// ArchivedSince is [DB.MarkedSince] for the rows of an outbox that are in the
// archive.
func (db *DB) ArchivedSince(
	ctx context.Context, t *outbox.Table, since time.Time, next *MarkCursor, limit int,
) ([]MarkedRow, error) {
	if !IsArchived(t) {
		return nil, nil
	}
	own := "t.outbox = " + pg.QuoteLiteral(t.String()) + sentSQL(t)
	if fits := t.WhereSQL("t"); fits != "" {
		own += " AND " + fits
	}
	archive := source{marked: db.own.archive}
	rows, err := db.markedSince(ctx, t, archive, "t.archived_at", own, since, next, limit)
	if lacksArchive(err) {
		return nil, nil
	}
	return rows, err
}

// lacksArchive reports whether there is no archive, or it has no column for what the outbox has: no row of
// the outbox is in it.
func lacksArchive(err error) bool {
	return pg.Code(err) == pgerrcode.UndefinedTable || pg.Code(err) == pgerrcode.UndefinedColumn
}

// Return makes archived rows pending again, as held ones, in their outbox. It
// returns how many they were: one whose id is in the outbox stays in the archive.
// Columns that the archive lacks take their defaults.
func (db *DB) Return(ctx context.Context, t *outbox.Table, rows []MarkedRow) (n int, err error) {
	ids, hashes, marks := markArgs(rows)
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		columns, err := returnedColumns(ctx, conn, t, db.own.archive)
		if err != nil {
			return err
		}
		return conn.QueryRow(ctx, returnSQL(t, db.own.archive, columns), ids, hashes, marks).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("make archived rows of %s pending again: %w", t, err)
	}
	return n, nil
}

func returnSQL(t *outbox.Table, archive string, columns []string) string {
	var names, values []string
	for _, name := range columns {
		column := outbox.QuoteIdent(name)
		names = append(names, column)
		switch name {
		case t.Layout.Columns[outbox.ProcessedAt]:
			column = "NULL"
		case t.Layout.Columns[outbox.LastError]:
			column = pg.QuoteLiteral(lostNote)
		default:
			column = "g." + column
		}
		values = append(values, column)
	}
	return strings.NewReplacer(
		"{archive}", archive, "{table}", t.SQL(), "{outbox}", pg.QuoteLiteral(t.String()),
		"{id}", t.Column(outbox.ID), "{idtype}", t.IDType, "{hash}", t.HashSQL("a"),
		"{processed}", t.Column(outbox.ProcessedAt), "{own}", pg.OwnPath,
		"{names}", strings.Join(names, ", "), "{values}", strings.Join(values, ", "),
	).Replace(`
WITH gone AS (
	DELETE FROM {archive} a WHERE a.outbox = {outbox} AND a.{id} = ANY ($1::text[]::{idtype}[])
		AND (a.{processed} = ANY ($3::timestamptz[])) IS TRUE AND {hash} = ANY ($2::bigint[])
		AND NOT EXISTS (SELECT FROM {table} t WHERE t.{id} = a.{id} OFFSET 0)
	RETURNING a.*
), put AS (
	INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE
	SELECT {values} FROM gone g ORDER BY g.{id} RETURNING 1
)
SELECT count(*)::int FROM put WHERE {own}`)
}

// returnedColumns are those that the outbox and the archive both have. What the
// outbox generates is generated again.
func returnedColumns(ctx context.Context, conn *pgx.Conn, t *outbox.Table, archive string) ([]string, error) {
	rows, _ := conn.Query(ctx, `SELECT o.attname::text FROM pg_attribute o JOIN pg_attribute a USING (attname)
		WHERE o.attrelid = to_regclass($1) AND o.attnum > 0 AND NOT o.attisdropped AND o.attgenerated = ''
			AND a.attrelid = to_regclass($2) AND a.attnum > 0 AND NOT a.attisdropped`, t.SQL(), archive)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Overdue lists those of the rows that are pending and have been due for longer
// than by.
func (db *DB) Overdue(
	ctx context.Context, t *outbox.Table, ids []string, by time.Duration,
) (overdue []string, err error) {
	if !t.Layout.Has(outbox.AvailableAt) || len(ids) == 0 {
		return nil, nil
	}
	sql := fmt.Sprintf(`SELECT t.%s FROM %s t WHERE t.%[1]s = ANY ($1::text[]::%[3]s[]) AND %[4]s
			AND (t.%[5]s < now() - %[6]d * interval '1 microsecond') IS TRUE`,
		t.Column(outbox.ID), sourceOf(t).all(givenIDs), t.IDType, UnmarkedSQL(t, "t"),
		t.Column(outbox.AvailableAt), by.Microseconds())
	err = db.QueryText(ctx, sql, []any{ids}, func(v [][]byte) error {
		overdue = append(overdue, string(v[0]))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for overdue rows of %s: %w", t, err)
	}
	return overdue, nil
}
