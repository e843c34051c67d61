-- psql --no-psqlrc --set ON_ERROR_STOP=1 --file insert.sql "$DATABASE_URL"
BEGIN;

UPDATE orders SET state = 'placed' WHERE id = 42;

INSERT INTO outbox_events (tenant_id, aggregate_type, aggregate_id, event_type, payload)
VALUES (7, 'order', '42', 'order.placed', '{"total": 1250, "currency": "EUR"}')
RETURNING id;

COMMIT;
