package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

const (
	mostLetters = 500 // in a list, or in a change
	// changedLetters are changed in a transaction: a statement over many large ones would take too long.
	changedLetters = 20
	// shownPayload bounds, in bytes, a payload that is shown.
	shownPayload = 256 << 10
)

type letterAnswer struct {
	ID            int64     `json:"id"`
	Outbox        string    `json:"outbox"`
	RowID         string    `json:"row_id"`
	EventType     *string   `json:"event_type"`
	AggregateType *string   `json:"aggregate_type"`
	AggregateID   *string   `json:"aggregate_id"`
	TenantID      *string   `json:"tenant_id"`
	Attempts      *int16    `json:"attempts"`
	FailedAt      time.Time `json:"failed_at"`
	Error         *string   `json:"error"`
	// WhatHelps is [deadletter.Cure]: a retry alone does not.
	WhatHelps string `json:"what_helps"`
	Bytes     *int   `json:"payload_bytes"`
}

func letterOf(l deadletter.Listed) letterAnswer {
	helps := ""
	if l.LastError != nil {
		helps = deadletter.Cure(deadletter.Class(*l.LastError))
	}
	return letterAnswer{
		ID: l.ID, Outbox: l.Outbox, RowID: l.RowID, EventType: l.EventType, AggregateType: l.AggregateType,
		AggregateID: l.AggregateID, TenantID: l.TenantID, Attempts: l.Attempts, FailedAt: l.FailedAt.UTC(),
		Error: l.LastError, WhatHelps: helps, Bytes: l.Bytes,
	}
}

type lettersAnswer struct {
	Total   int            `json:"total"`
	Limited bool           `json:"total_limit"`
	Letters []letterAnswer `json:"letters"`
	Next    *int64         `json:"next"`
}

// withQueue lends a connection to the dead letters.
func (c *Console) withQueue(ctx context.Context, use func(context.Context, *deadletter.Queue) error) error {
	return c.servers.postgres(ctx, func(db *table.DB) error {
		err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			q, err := deadletter.On(ctx, conn, deadletter.Config{
				Config: c.cfg.Postgres, Outboxes: c.servers.tables(),
			})
			if err != nil {
				return err
			}
			return use(ctx, q)
		})
		if pg.Code(err) == pgerrcode.QueryCanceled || errors.Is(err, context.DeadlineExceeded) {
			return hint.Wrap(err, "they are large, or many: choose fewer, or use `walpost dlq`")
		}
		return db.ExplainRead(ctx, nil, err)
	})
}

func (c *Console) deadLetters(_ http.ResponseWriter, r *http.Request) (any, error) {
	limit, err := number(r, "limit", 100, 1, mostLetters)
	if err != nil {
		return nil, err
	}
	before, err := number(r, "before", 0, 1, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	f := deadletter.Filter{Limit: int(limit)}
	for name, to := range map[string]*string{
		"event_type": &f.EventType, "aggregate_type": &f.AggregateType, "aggregate_id": &f.AggregateID,
		"tenant_id": &f.TenantID, "outbox": &f.Outbox,
	} {
		if *to, err = text(r, name); err != nil {
			return nil, err
		}
	}
	key := fmt.Sprintf("letters %d %d %+v", limit, before, f)
	return c.once(r.Context(), key, keepAnswer, func(ctx context.Context) (any, error) {
		return c.listLetters(ctx, f, before)
	})
}

func (c *Console) listLetters(ctx context.Context, f deadletter.Filter, before int64) (any, error) {
	a := &lettersAnswer{Letters: []letterAnswer{}}
	err := c.withQueue(ctx, func(ctx context.Context, q *deadletter.Queue) error {
		f, err := q.Now(ctx, f)
		if err != nil {
			return err
		}
		all, err := q.Newest(ctx, f, before)
		for ; table.TooLong(err) && f.Limit > 1; all, err = q.Newest(ctx, f, before) {
			// The letters are large, or the server is busy. Next leads to the others.
			f.Limit = max(f.Limit/10, 1)
		}
		if err != nil {
			return err
		}
		for _, l := range all {
			a.Letters = append(a.Letters, letterOf(l))
		}
		if len(all) == f.Limit {
			a.Next = &all[len(all)-1].ID
		}
		a.Total, err = q.Count(ctx, f, status.CountMost)
		a.Limited = a.Total >= status.CountMost
		return err
	})
	return a, err
}

func (c *Console) deadLetter(_ http.ResponseWriter, r *http.Request) (any, error) {
	id, err := pathID(r)
	if err != nil {
		return nil, err
	}
	return c.once(r.Context(), fmt.Sprint("letter ", id), keepAnswer, func(ctx context.Context) (any, error) {
		a := struct {
			letterAnswer
			Payload *string `json:"payload"`
			Cut     bool    `json:"payload_cut"`
		}{}
		err := c.withQueue(ctx, func(ctx context.Context, q *deadletter.Queue) error {
			l, payload, err := q.Peek(ctx, id, shownPayload)
			if err != nil {
				return err
			}
			a.letterAnswer = letterOf(l)
			if payload != nil && c.showsPayloads() {
				shown := string(whole([]byte(*payload), shownPayload))
				a.Payload, a.Cut = &shown, l.Bytes != nil && *l.Bytes > len(shown)
			}
			return nil
		})
		if errors.Is(err, deadletter.ErrNone) {
			err = &refusal{http.StatusNotFound, err}
		}
		return a, err
	})
}

// whole is the beginning of a text, up to a number of bytes, and ends with a character.
func whole(text []byte, most int) []byte {
	if len(text) <= most {
		return text
	}
	for end := most; end > most-utf8.UTFMax && end > 0; end-- {
		if utf8.RuneStart(text[end]) {
			return text[:end]
		}
	}
	return text[:most] // it is no UTF-8
}

type changeAnswer struct {
	Done   []int64        `json:"done"`
	Failed []failedChange `json:"failed"`
}

type failedChange struct {
	ID    int64  `json:"id"`
	Error string `json:"error"`
	Hint  string `json:"hint"`
}

func (c *Console) retry(w http.ResponseWriter, r *http.Request) (any, error) {
	return c.changeLetters(w, r, "retry", (*deadletter.Queue).Retry)
}

func (c *Console) discard(w http.ResponseWriter, r *http.Request) (any, error) {
	return c.changeLetters(w, r, "discard", (*deadletter.Queue).Discard)
}

// changeLetters tells of each dead letter what became of it.
func (c *Console) changeLetters(
	w http.ResponseWriter, r *http.Request, verb string,
	do func(*deadletter.Queue, context.Context, deadletter.Filter, bool, func(deadletter.Outcome)) error,
) (any, error) {
	ids, err := readIDs(w, r)
	if err != nil {
		return nil, err
	}
	ctx, done := c.changing(r)
	defer done()
	a := changeAnswer{Done: []int64{}, Failed: []failedChange{}}
	left := slices.Clone(ids)
	err = c.withQueue(ctx, func(ctx context.Context, q *deadletter.Queue) error {
		for some := range slices.Chunk(ids, changedLetters) {
			err := do(q, ctx, deadletter.Filter{IDs: some}, false, func(o deadletter.Outcome) {
				left = slices.DeleteFunc(left, func(id int64) bool { return id == o.ID })
				if o.Err == nil {
					a.Done = append(a.Done, o.ID)
					return
				}
				a.Failed = append(a.Failed, failedOf(o.ID, o.Err))
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil && len(left) == len(ids) {
		return nil, err
	}
	if err == nil {
		err = hint.Wrap(deadletter.ErrNone, "another one has retried or discarded it: load the list again")
	}
	for _, id := range left {
		a.Failed = append(a.Failed, failedOf(id, err))
	}
	c.cfg.Log.Info("console changed dead letters", zap.String("change", verb),
		zap.Int64s("dead_letters", a.Done), zap.Int("failed", len(a.Failed)),
		zap.String("client", r.RemoteAddr))
	return a, nil
}

func failedOf(id int64, err error) failedChange {
	return failedChange{id, hint.OneLine(err.Error()), hint.OneLine(hint.Of(err))}
}

func readIDs(w http.ResponseWriter, r *http.Request) ([]int64, error) {
	var body struct {
		IDs []int64 `json:"ids"`
	}
	if err := readBody(w, r, &body); err != nil {
		return nil, err
	}
	ids := slices.Compact(slices.Sorted(slices.Values(body.IDs)))
	switch {
	case len(ids) == 0:
		return nil, badRequest(`send {"ids": [1, 2]}`, "no dead letter is named")
	case len(ids) > mostLetters:
		return nil, badRequest(fmt.Sprintf("send %d at a time; `walpost dlq` takes any number", mostLetters),
			"%d dead letters are too many", len(ids))
	case ids[0] < 1:
		return nil, badRequest("the list shows the ids", "%d is not a dead letter id", ids[0])
	}
	return ids, nil
}
