package console

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

// keepAnswer is how long viewers share an answer.
const keepAnswer = time.Second

type overviewAnswer struct {
	Version    string    `json:"version"`
	At         time.Time `json:"at"`
	CanChange  bool      `json:"can_change"`
	ChangeHint string    `json:"change_hint"`
	// ShowsPayloads: payloads are not left out.
	ShowsPayloads bool            `json:"shows_payloads"`
	PayloadHint   string          `json:"payload_hint"`
	Status        *status.Report  `json:"status"`
	Relay         json.RawMessage `json:"relay"`
	RelayError    *string         `json:"relay_error"`
	ParkedError   string          `json:"parked_error"`
}

func (c *Console) overview(_ http.ResponseWriter, r *http.Request) (any, error) {
	value, err := c.once(r.Context(), "status", keepAnswer, c.report)
	if err != nil {
		return nil, err
	}
	advice := c.changeHint()
	o := overviewAnswer{
		Version: c.cfg.Version, At: time.Now().UTC(), CanChange: advice == "", ChangeHint: advice,
		Status: value.(*status.Report),
	}
	if o.ShowsPayloads = c.showsPayloads(); !o.ShowsPayloads {
		o.PayloadHint = "set http.token_file (WALPOST_HTTP_TOKEN_FILE) to see payloads, or run `walpost ui`"
	}
	o.Relay, o.RelayError = c.relay(r.Context())
	o.ParkedError = c.parkedError(r.Context(), o.Status)
	return o, nil
}

// report is what `walpost status` reports. A server that cannot be asked is named in it.
func (c *Console) report(ctx context.Context) (any, error) {
	r := status.New()
	var postgres, nats error
	var both sync.WaitGroup
	both.Go(func() {
		postgres = c.servers.postgres(ctx, func(db *table.DB) error {
			return r.AskPostgres(ctx, db, c.cfg.Postgres.Slot, c.servers.tables())
		})
	})
	both.Go(func() {
		s, err := c.servers.stream(ctx, c.cfg.Stream.Name)
		if err == nil {
			err = r.AskStream(ctx, s)
		}
		nats = err
	})
	both.Wait()
	if postgres != nil {
		r.Fail("postgres", postgres)
	}
	if nats != nil {
		r.Fail("nats", nats)
	}
	return r, nil
}

// relay is the relay's own status, or why it could not be read.
func (c *Console) relay(ctx context.Context) (json.RawMessage, *string) {
	value, err := c.once(ctx, "relay", keepAnswer, func(ctx context.Context) (any, error) {
		return c.cfg.Relay(ctx)
	})
	if err != nil {
		text := hint.OneLine(err.Error())
		if advice := hint.Of(err); advice != "" {
			text += " (" + advice + ")"
		}
		return nil, &text
	}
	return value.(json.RawMessage), nil
}

func (c *Console) sessions(_ http.ResponseWriter, r *http.Request) (any, error) {
	answer := struct {
		Sessions   json.RawMessage `json:"sessions"`
		RelayError *string         `json:"relay_error"`
	}{Sessions: json.RawMessage("[]")}
	raw, failed := c.relay(r.Context())
	answer.RelayError = failed
	if failed == nil {
		var relay struct {
			Sessions json.RawMessage `json:"sessions"`
		}
		if err := json.Unmarshal(raw, &relay); err != nil {
			return nil, err
		}
		if relay.Sessions != nil { // a relay of an earlier version keeps none
			answer.Sessions = relay.Sessions
		}
	}
	return answer, nil
}
