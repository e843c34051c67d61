package table

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Replays is the table of requests to publish stored rows again.
const Replays = "outbox_replays"

// ReplayState is how far a request is.
type ReplayState string

// The states of a request. A relay has begun with one that is running.
const (
	ReplayRequested ReplayState = "requested"
	ReplayRunning   ReplayState = "running"
	ReplayDone      ReplayState = "done"
	ReplayFailed    ReplayState = "failed"
	ReplayCancelled ReplayState = "cancelled"
)

// Open reports whether a relay has still to work on the request.
func (s ReplayState) Open() bool { return s == ReplayRequested || s == ReplayRunning }

// ReplayChoice says which stored rows of an outbox are published again. What is nil is every row.
type ReplayChoice struct {
	IDs           []string   `json:"ids"`
	EventTypes    []string   `json:"event_types"`
	AggregateType *string    `json:"aggregate_type"`
	AggregateID   *string    `json:"aggregate_id"`
	TenantID      *string    `json:"tenant_id"`
	Since         *time.Time `json:"since"` // of processed_at
	Until         *time.Time `json:"until"` // excluded; a request has one
}

// ReplayCursor is the last row that was stored or refused, and what the stream was then.
type ReplayCursor struct {
	At, ID   string // empty before the first row
	Created  time.Time
	Sequence uint64
}

// Replay is a request.
type Replay struct {
	ID     int64  `json:"replay_id"`
	Slot   string `json:"slot"`
	Outbox string `json:"outbox"`
	ReplayChoice
	ToStream    *string      `json:"to_stream"`
	State       ReplayState  `json:"state"`
	RequestedAt time.Time    `json:"requested_at"`
	RequestedBy string       `json:"requested_by"`
	Total       *int64       `json:"total"`
	Sent        int64        `json:"sent"`
	Refused     int64        `json:"refused"`
	LastError   *string      `json:"last_error"`
	StartedAt   *time.Time   `json:"started_at"`
	FinishedAt  *time.Time   `json:"finished_at"`
	Cursor      ReplayCursor `json:"-"`
}

const replayColumns = `r.replay_id, r.slot, r.outbox, r.ids, r.event_types, r.aggregate_type,
	r.aggregate_id, r.tenant_id, r.since, r.until, r.to_stream, r.state, r.requested_at, r.requested_by,
	r.total, r.sent, r.refused, r.last_error, r.started_at, r.finished_at,
	coalesce(r.last_processed_at::text, ''), coalesce(r.last_id, ''),
	coalesce(r.stream_created, 'epoch'), coalesce(r.stream_sequence, 0)`

func scanReplay(row pgx.CollectableRow) (*Replay, error) {
	r := &Replay{}
	err := row.Scan(&r.ID, &r.Slot, &r.Outbox, &r.IDs, &r.EventTypes, &r.AggregateType, &r.AggregateID,
		&r.TenantID, &r.Since, &r.Until, &r.ToStream, &r.State, &r.RequestedAt, &r.RequestedBy, &r.Total,
		&r.Sent, &r.Refused, &r.LastError, &r.StartedAt, &r.FinishedAt, &r.Cursor.At, &r.Cursor.ID,
		&r.Cursor.Created, &r.Cursor.Sequence)
	return r, err
}

// replays runs a query for requests. FROM and what follows is the caller's, with the table as r.
func (db *DB) replays(ctx context.Context, rest string, args ...any) (all []*Replay, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, "SELECT "+replayColumns+" FROM "+db.own.replays+" r "+rest, args...)
		all, err = pgx.CollectRows(rows, scanReplay)
		return err
	})
	if err != nil {
		if pg.Code(err) == pgerrcode.InsufficientPrivilege {
			err = hint.Wrap(err, fmt.Sprintf("as the tables' owner: GRANT SELECT ON %s TO %s",
				Replays, outbox.QuoteIdent(db.User())))
		}
		return nil, fmt.Errorf("read requests for replays: %w", db.explainReplays(err))
	}
	return all, nil
}

// TakesReplays reports whether the table of requests is there. It is an error that the role may not use it.
func (db *DB) TakesReplays(ctx context.Context) (there bool, err error) {
	var may bool
	err = db.QueryRow(ctx, []any{&there, &may}, `SELECT to_regclass($1) IS NOT NULL, coalesce(
		has_table_privilege(to_regclass($1), 'SELECT')
			AND has_table_privilege(to_regclass($1), 'UPDATE'), false)`,
		db.own.replays)
	if err == nil && there && !may {
		role := outbox.QuoteIdent(db.User())
		err = hint.Errorf(fmt.Sprintf("as the tables' owner: GRANT SELECT, INSERT, UPDATE ON %s TO %s",
			Replays, role), "role %s may not read and change %s", role, Replays)
	}
	return there, err
}

// NextReplay is the oldest request of a slot that is not finished, without those for some outboxes; nil where
// there is none, or no such table.
func (db *DB) NextReplay(ctx context.Context, slot string, except []string) (*Replay, error) {
	all, err := db.replays(ctx, `WHERE r.slot = $1 AND r.state IN ('requested', 'running')
		AND NOT r.outbox = ANY(coalesce($2::text[], '{}')) ORDER BY r.replay_id LIMIT 1`, slot, except)
	if len(all) == 0 || err != nil {
		if pg.Code(err) == pgerrcode.UndefinedTable {
			err = nil
		}
		return nil, err
	}
	return all[0], nil
}

// ListReplays lists the requests of every slot, the newest first.
func (db *DB) ListReplays(ctx context.Context, limit int) ([]*Replay, error) {
	return db.replays(ctx, `ORDER BY r.replay_id DESC LIMIT $1`, limit)
}

// ErrNoReplay means that there is no request of a number.
var ErrNoReplay = errors.New("no such request")

// ReadReplay reads one request.
func (db *DB) ReadReplay(ctx context.Context, id int64) (*Replay, error) {
	all, err := db.replays(ctx, `WHERE r.replay_id = $1`, id)
	if err == nil && len(all) == 0 {
		err = hint.Errorf("`walpost replay list` shows them", "replay %d: %w", id, ErrNoReplay)
	}
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// RequestReplay writes a request and returns its number.
func (db *DB) RequestReplay(ctx context.Context, r *Replay) (id int64, err error) {
	c := r.ReplayChoice
	err = db.QueryRow(ctx, []any{&id}, `WITH put AS (INSERT INTO `+db.own.replays+` (slot, outbox, ids,
			event_types, aggregate_type, aggregate_id, tenant_id, since, until, to_stream, total)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, least($9::timestamptz, now()), $10, $11) RETURNING replay_id)
		SELECT replay_id FROM put WHERE `+pg.OwnPath,
		r.Slot, r.Outbox, c.IDs, c.EventTypes, c.AggregateType, c.AggregateID, c.TenantID, c.Since, c.Until,
		r.ToStream, r.Total)
	if err != nil {
		return 0, fmt.Errorf("request a replay: %w", db.explainReplays(err))
	}
	return id, nil
}

// changeReplay reports whether the request was in a state in which it can be changed.
func (db *DB) changeReplay(
	ctx context.Context, id int64, set, where string, args ...any,
) (ok bool, err error) {
	err = db.QueryRow(ctx, []any{&ok}, fmt.Sprintf(`WITH done AS (
		UPDATE %s r SET %s WHERE r.replay_id = $1 AND %s RETURNING 1)
		SELECT count(*) = 1 FROM done WHERE %s`, db.own.replays, set, where, pg.OwnPath),
		append([]any{id}, args...)...)
	if err != nil {
		return false, fmt.Errorf("change replay %d: %w", id, db.explainReplays(err))
	}
	return ok, nil
}

// CancelReplay ends a request that is not finished. The relay notices it with its next portion.
func (db *DB) CancelReplay(ctx context.Context, id int64) (ok bool, err error) {
	return db.changeReplay(ctx, id,
		`state = 'cancelled', finished_at = now()`, `r.state IN ('requested', 'running')`)
}

// BeginReplay has a request run. Its messages stand behind a sequence of the stream. It reports false
// where the request was cancelled or deleted.
func (db *DB) BeginReplay(ctx context.Context, id int64, stream ReplayCursor) (ok bool, err error) {
	return db.changeReplay(ctx, id,
		`state = 'running', started_at = now(), stream_created = $2, stream_sequence = $3`,
		`r.state = 'requested'`, stream.Created, int64(stream.Sequence))
}

// unflushedSQL has the server acknowledge the commit before it has flushed it.
const unflushedSQL = `(SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL`

// AdvanceReplay writes how far a request that runs has come. A crash of the server may take that back:
// what was published since is in the stream, behind the sequence before. To flush it would delay the
// producers' commits. It reports false where it does not run any more.
func (db *DB) AdvanceReplay(ctx context.Context, r *Replay) (ok bool, err error) {
	c := r.Cursor
	return db.changeReplay(ctx, r.ID, `sent = $2, refused = $3,
		last_processed_at = nullif($4, '')::timestamptz, last_id = nullif($5, ''),
		stream_created = $6, stream_sequence = $7, last_error = $8`,
		`r.state = 'running' AND `+unflushedSQL,
		r.Sent, r.Refused, c.At, c.ID, c.Created, int64(c.Sequence), r.LastError)
}

// EndReplay ends a request.
func (db *DB) EndReplay(ctx context.Context, id int64, state ReplayState, lastError *string) error {
	_, err := db.changeReplay(ctx, id,
		`state = $2, finished_at = now(), last_error = coalesce($3, last_error)`,
		`r.state IN ('requested', 'running')`, string(state), lastError)
	return err
}

func (db *DB) explainReplays(err error) error {
	if hint.Of(err) != "" {
		return err
	}
	switch pg.Code(err) {
	case pgerrcode.UndefinedTable:
		return hint.Wrap(err, "run `walpost migrate up` as the tables' owner")
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, fmt.Sprintf("as the tables' owner: GRANT SELECT, INSERT, UPDATE ON %s TO %s; "+
			"GRANT SELECT ON %s TO %[2]s", Replays, outbox.QuoteIdent(db.User()), Archive))
	}
	return err
}

// IsRefused reports whether a server refuses a statement for what it says, or for a privilege: another
// try would end alike.
func IsRefused(err error) bool {
	return pg.InClass(err, pg.DataException, pg.ProgramLimitExceeded, "42")
}
