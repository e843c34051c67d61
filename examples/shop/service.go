// Package shop is an example: an order service, a read model, payments and an audit log, connected by events.
// Each effect happens once, whatever is killed meanwhile. Run it with `make shop`.
package shop

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/outbox"
)

// Schema is the SQL of the shop's tables.
//
//go:embed schema.sql
var Schema string

// Tenant is the only one of this shop.
const Tenant = 1

// Order is the state of an order, as events and responses have it.
type Order struct {
	ID       int64  `json:"id"`
	PublicID string `json:"public_id"`
	Total    int    `json:"total"`
	State    string `json:"state"`
	Version  int    `json:"version"`
}

// Change is the payload of every event of an order.
type Change struct {
	Before *Order `json:"before"`
	After  Order  `json:"after"`
}

// Service is the order service. Both requests take an Idempotency-Key.
//
//	POST  /orders              {"client_ref": "c-17", "total": 1250}
//	PATCH /orders/{public_id}  {"total": 1300}
func Service(pool *pgxpool.Pool) http.Handler {
	once := idempotency.Middleware(pool, idempotency.Options{
		Tenant:    idempotency.SingleTenant,
		Principal: func(*http.Request) string { return "client" }, // an example has no login
	})
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once(handler(place)))
	mux.Handle("PATCH /orders/{public_id}", once(handler(change)))
	return mux
}

// request is the body of both.
type request struct {
	ClientRef string `json:"client_ref"`
	Total     int    `json:"total"`
}

// handler runs f in a transaction with the response.
func handler(f func(context.Context, pgx.Tx, *http.Request, request) (*Change, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body request
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Total <= 0 {
			http.Error(w, "want JSON with a total above 0", http.StatusBadRequest)
			return
		}
		err := idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
			c, err := f(r.Context(), tx, r, body)
			if err != nil {
				return err
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			return json.NewEncoder(w).Encode(c.After)
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			http.Error(w, "there is no such order", http.StatusNotFound)
		case err != nil:
			http.Error(w, "the order was not changed", http.StatusInternalServerError)
		}
	})
}

func place(ctx context.Context, tx pgx.Tx, _ *http.Request, body request) (*Change, error) {
	o := Order{Total: body.Total, State: "placed", Version: 1}
	err := tx.QueryRow(ctx, `INSERT INTO orders (tenant_id, client_ref, total) VALUES ($1, $2, $3)
		RETURNING id, public_id::text`, Tenant, body.ClientRef, body.Total).Scan(&o.ID, &o.PublicID)
	if err != nil {
		return nil, fmt.Errorf("place order: %w", err)
	}
	c := &Change{After: o}
	return c, publish(ctx, tx, "order.placed", c)
}

func change(ctx context.Context, tx pgx.Tx, r *http.Request, body request) (*Change, error) {
	var id pgtype.UUID
	if id.Scan(r.PathValue("public_id")) != nil {
		return nil, pgx.ErrNoRows
	}
	before, err := lock(ctx, tx, `tenant_id = $1 AND public_id = $2`, Tenant, id)
	if err != nil {
		return nil, err
	}
	after := *before
	after.Total = body.Total
	return update(ctx, tx, "order.changed", before, after)
}

// lock reads an order for the transaction. Writers of one order exclude each other, and so its events are in
// the order of its versions.
func lock(ctx context.Context, tx pgx.Tx, condition string, key ...any) (*Order, error) {
	var o Order
	err := tx.QueryRow(ctx, `SELECT id, public_id::text, total, state, version FROM orders
		WHERE `+condition+` FOR UPDATE`, key...).Scan(&o.ID, &o.PublicID, &o.Total, &o.State, &o.Version)
	if err != nil {
		return nil, fmt.Errorf("read order %v: %w", key, err)
	}
	return &o, nil
}

// update writes a change and its event.
func update(ctx context.Context, tx pgx.Tx, eventType string, before *Order, after Order) (*Change, error) {
	after.Version++
	_, err := tx.Exec(ctx, `UPDATE orders SET total = $2, state = $3, version = $4 WHERE id = $1`,
		after.ID, after.Total, after.State, after.Version)
	if err != nil {
		return nil, fmt.Errorf("change order %d: %w", after.ID, err)
	}
	c := &Change{Before: before, After: after}
	return c, publish(ctx, tx, eventType, c)
}

func publish(ctx context.Context, tx pgx.Tx, eventType string, c *Change) error {
	payload, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	_, err = outbox.Insert(ctx, tx, outbox.Message{
		TenantID: Tenant, AggregateType: "order", AggregateID: c.After.ID,
		EventType: eventType, Payload: payload,
	})
	return err
}
