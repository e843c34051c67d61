-- +goose Up
-- Dead letters: rows that could not be delivered. Each was moved here in the transaction that deleted it from its outbox.
-- One table for all outboxes, so the columns that not every layout has are nullable, and `original` holds the whole row.
CREATE TABLE {schema}.outbox_messages_dlq (
    dead_letter_id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Where the row came from and goes back to on a retry: the table as "schema.table", the row's id as text, because
    -- other layouts have UUIDs, and the whole row. JSON and not JSONB: it is put back as it was, digits and order included.
    outbox         TEXT        NOT NULL,
    row_id         TEXT        NOT NULL,
    original       JSON,
    failed_at      TIMESTAMPTZ NOT NULL DEFAULT now(),
    -- From here on as in outbox_messages, to be read and searched. A value of another layout that does not fit a type
    -- stays NULL here and is found in `original`.
    id             BIGINT,
    tenant_id      BIGINT,
    aggregate_type TEXT,
    aggregate_id   BIGINT,
    event_type     TEXT,
    event_version  SMALLINT,
    payload        JSONB,
    occurred_at    TIMESTAMPTZ,
    available_at   TIMESTAMPTZ,
    processed_at   TIMESTAMPTZ,
    attempts       SMALLINT,
    last_error     TEXT,
    trace_id       TEXT
);

-- Not unique: an id that comes again, after TRUNCATE ... RESTART IDENTITY or a failover, is another event and may die too.
CREATE INDEX outbox_messages_dlq_row_idx ON {schema}.outbox_messages_dlq (outbox, row_id);

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.outbox_messages_dlq IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
DECLARE
    dead BIGINT;
BEGIN
    SELECT count(*) INTO dead FROM {schema}.outbox_messages_dlq;
    IF dead > 0 THEN
        RAISE EXCEPTION 'outbox_messages_dlq holds % undelivered row(s)', dead USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'retry or discard the dead letters first';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.outbox_messages_dlq;
