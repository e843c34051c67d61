package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgerrcode"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	listedReplays = 20
	// countReplay bounds the counting of rows: what is more cannot be counted in time anyway.
	countReplay = 10_000_000
	mostChosen  = 1000 // ids, or event types
)

func (c *Console) replays(_ http.ResponseWriter, r *http.Request) (any, error) {
	return c.once(r.Context(), "replays", keepAnswer, func(ctx context.Context) (any, error) {
		all := []*table.Replay{}
		err := c.servers.postgres(ctx, func(db *table.DB) error {
			some, err := db.ListReplays(ctx, listedReplays)
			all = append(all, some...)
			return err
		})
		return map[string]any{"replays": all}, err
	})
}

func (c *Console) cancelReplay(_ http.ResponseWriter, r *http.Request) (any, error) {
	id, err := pathID(r)
	if err != nil {
		return nil, err
	}
	ctx, done := c.changing(r)
	defer done()
	var after *table.Replay
	err = c.servers.postgres(ctx, func(db *table.DB) error {
		if _, err := db.ReadReplay(ctx, id); err != nil {
			return err
		}
		ok, err := db.CancelReplay(ctx, id)
		if err != nil {
			return err
		}
		after, err = db.ReadReplay(ctx, id)
		if err == nil && !ok {
			err = refuse(http.StatusConflict, "only one that is requested or running can be cancelled",
				"cancel replay %d: it is %s", id, after.State)
		}
		return err
	})
	if err == nil {
		c.cfg.Log.Info("console cancelled a replay", zap.Int64("replay", id),
			zap.String("client", r.RemoteAddr))
	}
	if errors.Is(err, table.ErrNoReplay) {
		err = &refusal{http.StatusNotFound, err}
	}
	return after, err
}

// replayRequest is what previewReplay counts and requestReplay asks for.
type replayRequest struct {
	Outbox     string   `json:"outbox"`
	IDs        []string `json:"ids"`
	EventTypes []string `json:"event_types"`
	Aggregate  string   `json:"aggregate"`
	Since      string   `json:"since"`
	Until      string   `json:"until"`
	// All has to be said where nothing narrows the choice.
	All bool `json:"all"`
	// ExpectedTotal is the total of the preview, null where that could not count the rows.
	ExpectedTotal *int64 `json:"expected_total"`
}

type previewAnswer struct {
	Total   *int64            `json:"total"` // null where the rows could not be counted in time
	ByType  []table.TypeCount `json:"by_type"`
	Warning string            `json:"warning"`
}

// choice checks what the request says. t is the outbox that is meant.
func (c *Console) choice(q *replayRequest) (t *outbox.Table, f table.ReplayChoice, err error) {
	var names []string
	for _, o := range c.servers.tables() {
		names = append(names, o.String())
		if q.Outbox == o.String() || q.Outbox == "" && len(c.cfg.Outboxes) == 1 {
			t = o
		}
	}
	if t == nil {
		return nil, f, badRequest("the outboxes are "+strings.Join(names, ", "), "outbox %q is none of them",
			cut(q.Outbox, 200))
	}
	if err := table.CheckReplayable(t); err != nil {
		return nil, f, &refusal{http.StatusBadRequest, err}
	}
	if err := q.check(); err != nil {
		return nil, f, err
	}
	f.IDs, f.EventTypes = q.IDs, q.EventTypes
	f.SetAggregate(q.Aggregate)
	if f.Since, err = timeOf("since", q.Since); err == nil {
		f.Until, err = timeOf("until", q.Until)
	}
	if err == nil && f.Since != nil && f.Until != nil && !f.Since.Before(*f.Until) {
		err = badRequest("swap them", "since %s is not before until %s", q.Since, q.Until)
	}
	return t, f, err
}

func (q *replayRequest) check() error {
	chosen := len(q.IDs)+len(q.EventTypes) > 0 || q.Aggregate+q.Since+q.Until != ""
	switch {
	case !chosen && !q.All:
		return badRequest(`narrow the choice, or send "all": true`, "which rows?")
	case chosen && q.All:
		return badRequest("leave one of them out", "all excludes other choices")
	case len(q.IDs) > mostChosen || len(q.EventTypes) > mostChosen:
		return badRequest("`walpost replay` takes any number", "more than %d are named", mostChosen)
	}
	for _, text := range append(slices.Concat(q.IDs, q.EventTypes), q.Aggregate) {
		if len(text) > mostText || strings.ContainsRune(text, 0) || !utf8.ValidString(text) {
			return badRequest("give up to 1024 bytes of UTF-8 without a NUL", "a name cannot be looked for")
		}
	}
	if slices.Contains(q.IDs, "") || slices.Contains(q.EventTypes, "") {
		return badRequest("leave it out where it is not meant", "an id or an event type is empty")
	}
	return nil
}

func timeOf(name, text string) (*time.Time, error) {
	if text == "" {
		return nil, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return nil, badRequest("as in 2026-01-31T12:00:00Z", "%s: %q is no time", name, cut(text, 100))
	}
	return &at, nil
}

func (c *Console) previewReplay(w http.ResponseWriter, r *http.Request) (any, error) {
	var q replayRequest
	if err := readBody(w, r, &q); err != nil {
		return nil, err
	}
	t, choice, err := c.choice(&q)
	if err != nil {
		return nil, err
	}
	a := &previewAnswer{ByType: []table.TypeCount{}}
	err = c.servers.postgres(r.Context(), func(db *table.DB) error {
		return c.count(r.Context(), db, t, choice, a)
	})
	return a, err
}

// count fills in a preview. That the rows cannot be counted in time is no error: they may be many.
func (c *Console) count(
	ctx context.Context, db *table.DB, t *outbox.Table, choice table.ReplayChoice, a *previewAnswer,
) error {
	if err := db.InspectDelivered(ctx, t); err != nil {
		return err
	}
	types, err := db.CountReplay(ctx, t, choice, countReplay)
	if pg.Code(err) == pgerrcode.QueryCanceled {
		a.Warning = "the rows cannot be counted within four seconds: they may be very many"
		return nil
	}
	if pg.InClass(err, pg.DataException) {
		return &refusal{http.StatusBadRequest, hint.Wrap(err, "give ids as the table has them")}
	}
	if err != nil {
		return err
	}
	total := int64(0)
	for _, x := range types {
		total += x.Rows
	}
	a.Total, a.ByType = &total, append(a.ByType, types...)
	if total >= countReplay {
		a.Warning = fmt.Sprintf("counting ended at %d rows: there may be more", countReplay)
	}
	return nil
}

func (c *Console) requestReplay(w http.ResponseWriter, r *http.Request) (any, error) {
	var q replayRequest
	if err := readBody(w, r, &q); err != nil {
		return nil, err
	}
	t, choice, err := c.choice(&q)
	if err != nil {
		return nil, err
	}
	ctx, done := c.changing(r)
	defer done()
	var id int64
	err = c.servers.postgres(ctx, func(db *table.DB) (err error) {
		id, err = c.putReplay(ctx, db, t, choice, q.ExpectedTotal)
		return err
	})
	if err != nil {
		return nil, err
	}
	c.cfg.Log.Info("console requested a replay", zap.Int64("replay", id), zap.Any("choice", choice),
		zap.Stringer("outbox", t), zap.String("client", r.RemoteAddr))
	return map[string]int64{"replay_id": id}, nil
}

// putReplay requests what the preview has counted, and nothing else.
func (c *Console) putReplay(
	ctx context.Context, db *table.DB, t *outbox.Table, choice table.ReplayChoice, expected *int64,
) (int64, error) {
	var now previewAnswer
	if err := c.count(ctx, db, t, choice, &now); err != nil {
		return 0, err
	}
	const again = "send the preview again, and its total as expected_total"
	switch {
	case now.Total != nil && *now.Total == 0:
		return 0, badRequest("only delivered rows are published again", "no delivered row of %s is meant", t)
	case expected == nil && now.Total != nil:
		return 0, refuse(http.StatusConflict, again,
			"expected_total is missing: %d rows are meant", *now.Total)
	case expected != nil && now.Total == nil:
		return 0, refuse(http.StatusConflict, again, "the rows cannot be counted now")
	case expected != nil && *expected != *now.Total:
		return 0, refuse(http.StatusConflict, again,
			"%d rows are meant now, and not %d", *now.Total, *expected)
	}
	return db.RequestReplay(ctx, &table.Replay{
		Slot: c.cfg.Postgres.Slot, Outbox: t.String(), ReplayChoice: choice, Total: now.Total,
	})
}
