package console

import (
	"context"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

// consumersSchema is where the tables of consumers are unless a command is told otherwise.
const consumersSchema = "public"

type consumersAnswer struct {
	Consumers []status.Consumer `json:"consumers"`
	Error     string            `json:"error"`
	Hint      string            `json:"hint"`
}

// consumers are those whose tables are in the outboxes' database. Where there are none the answer says so.
func (c *Console) consumers(_ http.ResponseWriter, r *http.Request) (any, error) {
	return c.once(r.Context(), "consumers", keepAnswer, func(ctx context.Context) (any, error) {
		a := consumersAnswer{Consumers: []status.Consumer{}}
		var all []*consumers.Consumer
		err := c.servers.postgres(ctx, func(db *table.DB) error {
			return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
				own := c.servers.cfg.Postgres.Own
				own.Schema = consumersSchema
				t, err := consumers.On(ctx, conn, own)
				if err == nil {
					all, err = t.List(ctx, "")
				}
				return err
			})
		})
		if err == nil {
			a.Consumers = status.WithEnds(all, func(name string) *uint64 {
				last, failed := c.streamEnd(ctx, name)
				if failed != nil {
					err = failed
				}
				return last
			})
		}
		switch {
		case errors.Is(err, consumers.ErrNoTables): // no error: they may be in another database, or nowhere
			a.Hint = hint.OneLine(hint.Of(err))
		case err != nil:
			a.Error, a.Hint = hint.OneLine(err.Error()), hint.OneLine(hint.Of(err))
		}
		return a, nil
	})
}

func (c *Console) streamEnd(ctx context.Context, name string) (*uint64, error) {
	s, err := c.servers.stream(ctx, name)
	if err != nil {
		return nil, err
	}
	info, err := s.Info(ctx)
	if err != nil {
		return nil, err
	}
	return &info.LastSeq, nil
}
