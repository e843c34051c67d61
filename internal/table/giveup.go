package table

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// GiveUp leaves a parked row one last attempt, which is due at once: the relay that runs, or the next one,
// makes the row a dead letter if that fails, too. attempts is after how many of them it does so.
//
// Only the relay sends rows and makes dead letters, so GiveUp needs no lock of the relay's. If the row is in
// flight, its mark or its next record wins: the change waits for the row's lock and then looks again, and a
// failure of an attempt from before the change is not recorded.
func (db *DB) GiveUp(ctx context.Context, t *outbox.Table, id string, attempts int) error {
	var n int
	err := db.QueryRow(ctx, []any{&n}, fmt.Sprintf(
		`WITH changed AS (%s RETURNING 1) SELECT count(*)::int FROM changed WHERE %s`,
		MarkOf(t).giveUpSQL(t, attempts), pg.OwnPath), id)
	if err == nil && n == 0 {
		err = db.whyNotParked(ctx, t, id)
	}
	records := t.SQL()
	if Journals(t) {
		records = t.Journal.Deferred
	}
	switch code := pg.Code(err); {
	case pg.InClass(err, pg.DataException): // the id is no value of the column's type
		return hint.Wrap(err, parkedIDs)
	case code == pgerrcode.LockNotAvailable || code == pgerrcode.QueryCanceled:
		return hint.Wrap(err, "another session has the row locked: "+
			"run this again when its transaction has ended")
	case code == pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, fmt.Sprintf("as the tables' owner: GRANT SELECT, UPDATE ON %s TO %s",
			records, outbox.QuoteIdent(db.User())))
	}
	return err
}

const parkedIDs = "`walpost dlq list --parked` shows the ids, in the column ROW"

// giveUpSets are the assignments that make the next attempt of the parked row t the last one, and due.
func giveUpSets(t *outbox.Table, attempts int) *sets {
	s := &sets{table: t}
	s.add(outbox.Attempts, fmt.Sprintf("GREATEST(t.%s, %d)", t.Column(outbox.Attempts), attempts))
	if s.add(outbox.AvailableAt, "now()"); !t.Layout.Has(outbox.AvailableAt) {
		failure := "t." + t.Column(outbox.LastError)
		s.add(outbox.LastError, fmt.Sprintf(
			"CASE WHEN left(%s, %d) = '%s' THEN substr(%[1]s, %d) ELSE %[1]s END",
			failure, len(retryAfter), retryAfter, len(retryAfter)+retryBytes+len(": ")+1))
	}
	return s
}

// giveUpSQL implements Mark.
func (inRow) giveUpSQL(t *outbox.Table, attempts int) string {
	return fmt.Sprintf("UPDATE %s t SET %s WHERE t.%s = $1::text::%s AND %s AND (%s) IS NOT TRUE",
		t.SQL(), giveUpSets(t, attempts).sql(), t.Column(outbox.ID), t.IDType, recordedSQL(t), heldIs(t, "t"))
}

// giveUpSQL implements Mark. It inserts nothing: a deferral that is gone is one of a delivered row.
func (journaled) giveUpSQL(t *outbox.Table, attempts int) string {
	return journalSQL(t, `UPDATE {deferred} d
		SET attempts = GREATEST(d.attempts, {most}), available_at = now()
		WHERE d.outbox = {outbox} AND d.id = $1::text::bigint AND d.last_error NOT LIKE '{held}%'
			AND EXISTS (SELECT FROM {table} e WHERE e.{id} = d.id{filter})`,
		"{most}", strconv.Itoa(attempts), "{held}", Held, "{filter}", FilterSQL(t, "e"))
}

// whyNotParked says what a row is that is not parked.
func (db *DB) whyNotParked(ctx context.Context, t *outbox.Table, id string) error {
	var is string
	err := db.QueryRow(ctx, []any{&is}, fmt.Sprintf(`SELECT CASE
			WHEN (%s) IS NOT TRUE THEN 'settled' WHEN (true%s) IS NOT TRUE THEN 'foreign'
			WHEN (%s) IS NOT TRUE THEN 'fresh' WHEN (%s) IS TRUE THEN 'kept' WHEN (%s) IS TRUE THEN 'held'
			ELSE 'parked' END
		FROM %s t WHERE t.%s = $1::text::%s LIMIT 1`,
		UnmarkedSQL(t, "t"), FilterSQL(t, "t"), recordedIs(t, "t"), keptIs(t, "t"), heldIs(t, "t"),
		sourceOf(t).all("(SELECT $1::text::bigint AS id)"), t.Column(outbox.ID), t.IDType), id)
	if errors.Is(err, pgx.ErrNoRows) {
		return hint.Errorf(parkedIDs, "there is no such row")
	}
	if err != nil {
		return err
	}
	switch is {
	case "settled":
		return errors.New("it is not parked: it is delivered, or a dead letter already")
	case "foreign":
		return hint.Errorf("outboxes[].where and shard say which rows are its own",
			"it is not parked by this relay: the row is none of its own")
	case "fresh":
		return errors.New("it is not parked: it has not failed")
	case "kept":
		return hint.Errorf("`walpost dlq list` shows its dead letter", "it is a dead letter already")
	case "held":
		return hint.Errorf("give up the row that it waits for: `walpost dlq list --parked` shows it",
			"it is not parked: it is held behind a parked row of its aggregate")
	}
	return hint.Errorf("run this again", "it has been changed meanwhile")
}
