package table

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// SentTable has what a relay remembers of the outboxes that it delivers, see [Sent].
const SentTable = "outbox_sent"

// SentPrivileges are what a relay needs on outbox_sent.
const SentPrivileges = "SELECT, INSERT, UPDATE"

// Sent is a row of outbox_sent: a relay delivers an outbox, or a part of it, to a stream.
type Sent struct {
	id     int64
	Outbox string `json:"outbox"`
	Source string `json:"source"`
	// Shard is as in "1/4", and empty for every row. Condition is outboxes[].where.
	Shard     string `json:"shard"`
	Condition string `json:"where"`
	Stream    string `json:"stream"`
	Domain    string `json:"domain"`
	Slot      string `json:"slot"`
	// Initial is what became of the rows that were pending at the first start: pending is published, none
	// is marked.
	Initial string `json:"initial"`
	// BegunAt is the time of the first start; nil makes the next start a first one.
	BegunAt *time.Time `json:"begun_at"`
	// PublishedAs says by what the publication has the table since all rows from before that were answered:
	// the slot brings every later one. "" where the rows are left to the table.
	PublishedAs string `json:"published_as"`
	Noted
}

// Noted is what the sessions of a delivery have noted. Times are those of PostgreSQL's clock.
type Noted struct {
	// StreamCreated tells the stream from another one of its name; nil where nothing was noted yet.
	StreamCreated *time.Time `json:"stream_created"`
	// ReadSequence and ReadMessage are the last message of this source that the session found in the stream
	// when it began. ReadMessage is its Nats-Msg-Id, and empty where there was none.
	ReadSequence uint64 `json:"read_sequence"`
	ReadMessage  string `json:"read_message"`
	// ReadStoredAt is when JetStream stored that message, to the microsecond.
	ReadStoredAt *time.Time `json:"read_stored_at"`
	// ReadAt is when: all rows that were marked by then had been compared with the stream. nil where they
	// could not be, or where the clock has gone back since.
	ReadAt *time.Time `json:"read_at"`
	// LastSequence: the rows of all messages up to there are settled, as it was up to a second ago.
	LastSequence uint64 `json:"last_sequence"`
	// NotedAt is the greatest time of a note.
	NotedAt *time.Time `json:"noted_at"`
	// EndedAt is when the relay stopped, or another relay of the outbox began after it had crashed: no row
	// was marked by it later. nil while it runs, and where the clock has gone back.
	EndedAt *time.Time `json:"ended_at"`
	// Forms are what the messages were like, the oldest first.
	Forms []SentForm `json:"forms"`
	// delivered are the times of all sessions. The last one has no end while it runs, or where it crashed and
	// no other delivery of the outbox has begun since.
	delivered pgtype.Multirange[pgtype.Range[pgtype.Timestamptz]]
}

// SentOf is the delivery of an outbox from a source to a stream.
func SentOf(t *outbox.Table, source, stream, domain string) Sent {
	return Sent{
		Outbox: t.String(), Source: source, Shard: t.Shard.String(), Condition: t.Where,
		Stream: stream, Domain: domain,
	}
}

// SentForm is what messages of a delivery are like. From is the sequence of the first one: messages below the
// least one of a delivery may have another form.
type SentForm struct {
	From uint64          `json:"from"`
	Form json.RawMessage `json:"form"`
}

// SameDelivery reports whether both rows are of the same rows of an outbox, from the same source to the
// same stream.
func (s *Sent) SameDelivery(other *Sent) bool {
	return s.SameMessages(other) && s.Shard == other.Shard && s.Condition == other.Condition
}

// SameMessages reports whether the messages of both have the same ids in the same stream, if they deliver the
// same rows.
func (s *Sent) SameMessages(other *Sent) bool {
	return s.Outbox == other.Outbox && s.Source == other.Source &&
		s.Stream == other.Stream && s.Domain == other.Domain
}

// Overlaps reports whether both may deliver the same rows. Conditions are not compared.
func (s *Sent) Overlaps(other *Sent) bool {
	return s.Outbox == other.Outbox && shardsOverlap(s.Shard, other.Shard)
}

// SharesRows reports whether both deliver some of the same rows. Of two different conditions nothing tells
// whether rows fit both: they count as parts of an outbox.
func (s *Sent) SharesRows(other *Sent) bool {
	return s.Overlaps(other) &&
		(s.Condition == other.Condition || s.Condition == "" || other.Condition == "")
}

// Begun says what outbox_sent knows of the first start of a delivery.
type Begun int

const (
	// NotKnown: there is no row.
	NotKnown Begun = iota
	// NotBegun: an operator has said that the next start is the first one.
	NotBegun
	// WasBegun: these rows were delivered before, to this stream or to another.
	WasBegun
	// MaybeBegun: the outbox was delivered under another condition. Nothing tells which rows both fit.
	MaybeBegun
)

// Covers reports whether this one delivers all rows that the other does.
func (s *Sent) Covers(other *Sent) bool {
	return s.Outbox == other.Outbox && (s.Shard == "" || s.Shard == other.Shard) &&
		(s.Condition == "" || s.Condition == other.Condition)
}

// BegunIn looks for a delivery among the rows of outbox_sent.
func (s *Sent) BegunIn(known []Sent) Begun {
	begun := NotKnown
	for i := range known {
		k := &known[i]
		switch {
		case k.SameDelivery(s) && k.BegunAt == nil:
			return NotBegun
		case k.BegunAt == nil || !k.Overlaps(s):
		case k.SharesRows(s):
			begun = WasBegun
		case begun == NotKnown:
			begun = MaybeBegun
		}
	}
	return begun
}

// IsNoted reports whether the rows have this delivery as it is now.
func (s *Sent) IsNoted(known []Sent) bool {
	return slices.ContainsFunc(known, func(k Sent) bool {
		return k.SameDelivery(s) && k.BegunAt != nil && k.Slot == s.Slot
	})
}

// shardsOverlap reports whether two shards have rows in common. The hash of a row modulo both numbers of
// shards is known only modulo their greatest common divisor.
func shardsOverlap(a, b string) bool {
	x, err := outbox.ParseShard(a)
	if err != nil || x.All() {
		return true
	}
	y, err := outbox.ParseShard(b)
	if err != nil || y.All() {
		return true
	}
	common, rest := x.Of, y.Of
	for rest != 0 {
		common, rest = rest, common%rest
	}
	return (x.Index-y.Index)%common == 0
}

// Sent returns the rows of outbox_sent. exists is false where the table does not exist. It fails where the
// role lacks one of the privileges, such as "SELECT, INSERT".
func (db *DB) Sent(ctx context.Context, privileges string) (known []Sent, exists bool, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		known, exists, err = db.readSent(ctx, conn, privileges)
		return err
	})
	return known, exists, err
}

func (db *DB) readSent(
	ctx context.Context, q queryer, privileges string,
) (known []Sent, exists bool, err error) {
	var lacking string
	// An application may have a table of that name.
	err = q.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM pg_attribute
			WHERE attrelid = to_regclass($1) AND attname IN ('condition', 'begun_at')) = 2,
			coalesce(string_agg(p, ', '), '')
		FROM unnest(string_to_array($2, ', ')) p WHERE NOT has_table_privilege(to_regclass($1), p)`,
		db.own.sent, privileges).Scan(&exists, &lacking)
	if err != nil || !exists {
		return nil, false, err
	}
	if lacking != "" {
		return nil, true, hint.Coded("table-sent-privileges", hint.Errorf(
			fmt.Sprintf("GRANT %s ON %s TO %s", lacking, db.own.sent, outbox.QuoteIdent(db.User())),
			"the role lacks privileges on table %s: %s", SentTable, lacking))
	}
	rows, _ := q.Query(ctx, `
		SELECT id, outbox, source, shard, condition, stream, domain, slot, initial, begun_at,
			coalesce(published_as, ''),
			stream_created, coalesce(read_sequence, 0), coalesce(read_message, ''), read_stored_at, read_at,
			coalesce(last_sequence, 0), noted_at, ended_at, forms, delivered
		FROM `+db.own.sent+` ORDER BY outbox, source, stream, domain, condition, shard, id`)
	known, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Sent, err error) {
		err = row.Scan(&s.id, &s.Outbox, &s.Source, &s.Shard, &s.Condition, &s.Stream, &s.Domain,
			&s.Slot, &s.Initial, &s.BegunAt, &s.PublishedAs,
			&s.StreamCreated, &s.ReadSequence, &s.ReadMessage, &s.ReadStoredAt, &s.ReadAt,
			&s.LastSequence, &s.NotedAt, &s.EndedAt, &s.Forms, &s.delivered)
		return s, err
	})
	if err != nil {
		return nil, true, fmt.Errorf("read %s: %w", SentTable, err)
	}
	return known, true, nil
}

// Start is what a start does with an outbox, see [Begin].
type Start struct {
	Sent
	Table *outbox.Table
	// Skips: the rows that are pending are marked instead of being sent.
	Skips bool
}

// Begin notes in outbox_sent that deliveries begin, and marks the pending rows of those that skip them: one
// transaction, for all of them. It returns how many rows were marked of each. It waits for rows that are
// locked. It marks nothing where a delivery that skips has begun meanwhile, because an operator or another
// relay has said so.
func Begin(ctx context.Context, cfg Config, starts []Start) (skipped []int64, err error) {
	db, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	db.EndWithContext()
	err = db.Use(ctx, func(_ context.Context, conn *pgx.Conn) error {
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		const limits = `SET lock_timeout = '1min'; SET statement_timeout = 0; SET enable_seqscan = on`
		if _, err := conn.Exec(ctx, limits); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			skipped, err = skip(ctx, tx, starts)
			if err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, lockSentSQL); err != nil {
				return err
			}
			for _, s := range starts {
				if err := s.check(ctx, tx, db.own.sent); err != nil {
					return err
				}
			}
			for _, s := range starts {
				if err := s.note(ctx, tx, db.own.sent, "now()"); err != nil {
					return err
				}
			}
			_, err := tx.Exec(ctx, pg.ShowPath)
			return err
		})
	})
	return skipped, err
}

// skip marks the pending rows of the starts that skip them. The search for them may take long: no lock is
// held meanwhile for which marks would wait.
func skip(ctx context.Context, tx pgx.Tx, starts []Start) (rows []int64, err error) {
	rows = make([]int64, len(starts))
	mark := func(i int, args ...any) error {
		t := starts[i].Table
		err := tx.QueryRow(ctx, MarkOf(t).skipSQL(t), args...).Scan(&rows[i])
		if err == nil {
			_, err = tx.Exec(ctx, pg.HidePath)
		}
		if err != nil {
			return fmt.Errorf("mark the rows that are pending in %s: %w", t, err)
		}
		return nil
	}
	found, tables := map[int]string{}, []*outbox.Table{}
	for i, s := range starts {
		switch {
		case !s.Skips:
		case !Journals(s.Table):
			err = mark(i)
		default:
			var ids string
			err = tx.QueryRow(ctx, toSkipSQL(s.Table)).Scan(&ids)
			found[i], tables = ids, append(tables, s.Table)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(tables) == 0 {
		return rows, nil
	}
	_, err = tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'`)
	if err == nil {
		err = LockMoves(ctx, tx, tables...)
	}
	for i, ids := range found {
		if err == nil {
			err = mark(i, ids)
		}
	}
	return rows, err
}

// check returns an error where a start would skip rows and is none any more.
func (s *Start) check(ctx context.Context, tx pgx.Tx, sent string) error {
	if !s.Skips {
		return nil
	}
	var begun bool
	err := tx.QueryRow(ctx,
		`SELECT EXISTS (SELECT FROM `+sent+` WHERE `+deliverySQL+` AND begun_at IS NOT NULL)`,
		s.key()...).Scan(&begun)
	if err == nil && begun {
		err = fmt.Errorf("the first start of %s was made meanwhile: no row is marked", s.Outbox)
	}
	return err
}

// deliverySQL is SameDelivery, with key as its arguments.
const deliverySQL = `(outbox, source, shard, condition, stream, domain) = ($1, $2, $3, $4, $5, $6)`

func (s *Sent) key() []any {
	return []any{s.Outbox, s.Source, s.Shard, s.Condition, s.Stream, s.Domain}
}

// lockSentSQL has those who add rows, or make a start the first one, wait for each other.
const lockSentSQL = `SELECT pg_advisory_xact_lock(hashtextextended('outbox_sent', 0))`

// note writes the row, of which there is one at most: writers take a lock. A first start that was made
// is kept, and only the slot changes, unless begunAt is NULL.
func (s *Sent) note(ctx context.Context, tx pgx.Tx, sent, begunAt string) error {
	sql := strings.NewReplacer(
		"{sent}", sent, "{begun}", begunAt, "{own}", pg.OwnPath,
		"{keeps}", begunAt+" IS NOT NULL AND begun_at IS NOT NULL",
	).Replace(`
WITH changed AS (
	UPDATE {sent} SET slot = $7, published_as = CASE WHEN slot = $7 THEN published_as END,
		initial = CASE WHEN {keeps} THEN initial ELSE $8 END,
		begun_at = CASE WHEN {keeps} THEN begun_at ELSE {begun} END
	WHERE ` + deliverySQL + ` RETURNING 1
), added AS (
	INSERT INTO {sent} (outbox, source, shard, condition, stream, domain, slot, initial, begun_at)
	SELECT $1, $2, $3, $4, $5, $6, $7, $8, {begun} WHERE NOT EXISTS (SELECT FROM changed) RETURNING 1
)
SELECT (SELECT count(*) FROM changed) + (SELECT count(*) FROM added) WHERE {own}`)
	_, err := tx.Exec(ctx, lockSentSQL)
	if err == nil {
		_, err = tx.Exec(ctx, sql, append(s.key(), s.Slot, s.Initial)...)
	}
	if err == nil {
		_, err = tx.Exec(ctx, pg.HidePath)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", SentTable, err)
	}
	return nil
}

// NoteSent writes what an operator says of an outbox: it was begun, or its next start is a first one.
func (db *DB) NoteSent(ctx context.Context, s Sent, begun bool) error {
	at := "NULL"
	if begun {
		at = "now()"
	}
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			err := s.note(ctx, tx, db.own.sent, at)
			if err == nil {
				_, err = tx.Exec(ctx, pg.ShowPath)
			}
			return err
		})
	})
}

// SlotInUse reports whether another session holds the lock of the slot that outbox_sent has of a delivery.
func (db *DB) SlotInUse(ctx context.Context, of Sent) (used bool, err error) {
	err = db.QueryRow(ctx, []any{&used}, `
		SELECT EXISTS (SELECT FROM `+db.own.sent+` s
			JOIN pg_locks l ON `+heldSQL("hashtextextended('walpost/' || s.slot, 0)")+`
			WHERE `+deliverySQL+` AND l.pid <> pg_backend_pid())`,
		of.key()...)
	return used, err
}

// NoteRead writes that a session begins, of deliveries of which [DB.Sent] has returned the rows: before it
// marks a row. Of those in compared all rows that are marked are in the stream, or pending again. The rows
// have the forms that are to be written.
func (db *DB) NoteRead(ctx context.Context, of []Sent, read Noted, compared []Sent) error {
	forms := make([]string, len(of))
	for i := range of {
		text, err := json.Marshal(of[i].Forms)
		if err != nil {
			return err
		}
		forms[i] = string(text)
	}
	return db.changeSent(ctx, `
WITH noted AS (
	UPDATE {sent} s SET stream_created = $2, read_sequence = $3, read_message = $4, read_stored_at = $8,
		read_at = CASE WHEN s.id = ANY($5) THEN now() END, last_sequence = $6,
		noted_at = greatest(noted_at, now()), ended_at = NULL, forms = n.forms::jsonb,
		delivered = delivered + tstzmultirange(tstzrange(CASE WHEN upper(delivered) > now() OR EXISTS (
			SELECT FROM {sent} o, unnest(o.delivered) d
			WHERE o.outbox = s.outbox AND o.id <> s.id AND lower(d) >= upper(s.delivered)
		) THEN now() ELSE coalesce(upper(delivered), now()) END, NULL))
	FROM unnest($1::bigint[], $7::text[]) n (id, forms) WHERE s.id = n.id RETURNING 1
)
SELECT count(*) FROM noted WHERE `+pg.OwnPath,
		ids(of), read.StreamCreated, int64(read.ReadSequence), read.ReadMessage, ids(compared),
		int64(read.LastSequence), forms, read.ReadStoredAt)
}

// NoteLast writes up to where the messages of a session are settled. ended: it marks nothing any more. Where
// the clock is behind the last note, its times do not tell when rows were marked.
func (db *DB) NoteLast(ctx context.Context, of []Sent, seq uint64, ended bool) error {
	return db.changeSent(ctx, `
WITH noted AS (
	UPDATE {sent} SET last_sequence = $2,
		read_at = CASE WHEN noted_at <= now() THEN read_at END, noted_at = greatest(noted_at, now()),
		ended_at = CASE WHEN $3 AND noted_at <= now() THEN now() END,
		delivered = CASE WHEN $3 THEN {until} ELSE delivered END
	WHERE id = ANY($1) RETURNING 1
)
SELECT count(*) FROM noted WHERE `+pg.OwnPath, ids(of), int64(seq), ended)
}

// NotePublished writes since when the slot brings the rows of deliveries, see [Sent.PublishedAs].
func (db *DB) NotePublished(ctx context.Context, of []Sent) error {
	if len(of) == 0 {
		return nil
	}
	as := make([]string, len(of))
	for i := range of {
		as[i] = of[i].PublishedAs
	}
	return db.changeSent(ctx, `
WITH noted AS (
	UPDATE {sent} s SET published_as = nullif(n.published_as, '')
	FROM unnest($1::bigint[], $2::text[]) n (id, published_as) WHERE s.id = n.id RETURNING 1
)
SELECT count(*) FROM noted WHERE `+pg.OwnPath, ids(of), as)
}

// LeaveOut writes that a slot has brought rows that none but these deliveries has taken.
func (db *DB) LeaveOut(ctx context.Context, of []Sent, slot string) error {
	return db.changeSent(ctx, `
WITH noted AS (
	UPDATE {sent} SET published_as = NULL
	WHERE published_as IS NOT NULL AND id <> ALL($1) AND slot = $2 RETURNING 1
)
SELECT count(*) FROM noted WHERE `+pg.OwnPath, ids(of), slot)
}

// EndOthers writes that other deliveries of the same outboxes have ended: to another stream, from another
// source, in other shards. No relay delivers them, although one may wait to do so.
func (db *DB) EndOthers(ctx context.Context, of []Sent) error {
	names := make([]string, len(of))
	for i := range of {
		names[i] = of[i].Outbox
	}
	return db.changeSent(ctx, `
WITH ended AS (
	UPDATE {sent} s SET ended_at = CASE WHEN noted_at <= now() THEN now() END, delivered = {until}
	WHERE outbox = ANY($1) AND id <> ALL($2)
		AND ended_at IS NULL AND (noted_at <= now() OR upper_inf(delivered))
		AND NOT EXISTS (SELECT FROM pg_locks l
			WHERE `+heldSQL(deliversKeySQL)+` AND l.pid <> pg_backend_pid())
	RETURNING 1
)
SELECT count(*) FROM ended WHERE `+pg.OwnPath, names, ids(of))
}

// Apart reports whether marks of a table that are made from now on are later than those of every delivery
// of the outbox that has ended: a column may have whole seconds only.
func (db *DB) Apart(ctx context.Context, t *outbox.Table) (apart bool, err error) {
	typ, err := db.markType(ctx, t)
	if err != nil || typ == "" {
		return true, err
	}
	err = db.QueryRow(ctx, []any{&apart}, `SELECT NOT EXISTS (SELECT FROM `+db.own.sent+`
		WHERE outbox = $1 AND upper(delivered) <= now() AND upper(delivered)::`+typ+` >= now()::`+typ+`)`,
		t.String())
	if err != nil {
		err = fmt.Errorf("read %s: %w", SentTable, err)
	}
	return apart, err
}

// SentBlocker describes the session that has a lock on outbox_sent or on a row of it, or "".
func (db *DB) SentBlocker(ctx context.Context) (who string, err error) {
	return db.blocker(ctx, nil, []string{db.own.sent})
}

// deliveredUntilSQL is delivered when a session has ended. Its marks may be as late as its notes.
const deliveredUntilSQL = `delivered * tstzmultirange(tstzrange(NULL, greatest(noted_at, now()), '[]'))`

func ids(of []Sent) []int64 {
	all := make([]int64, len(of))
	for i := range of {
		all[i] = of[i].id
	}
	return all
}

func (db *DB) changeSent(ctx context.Context, sql string, args ...any) error {
	var n int
	sql = strings.NewReplacer("{sent}", db.own.sent, "{until}", deliveredUntilSQL).Replace(sql)
	err := db.QueryRow(ctx, []any{&n}, sql, args...)
	if err != nil {
		return fmt.Errorf("write %s: %w", SentTable, err)
	}
	return nil
}

// ForgetSent deletes what is known of an outbox. It returns the number of rows.
func (db *DB) ForgetSent(ctx context.Context, name string) (rows int64, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `WITH gone AS (DELETE FROM `+db.own.sent+` WHERE outbox = $1 RETURNING 1)
			SELECT count(*) FROM gone WHERE `+pg.OwnPath, name).Scan(&rows)
	})
	return rows, err
}
