-- +goose Up
-- One row for each Idempotency-Key of an HTTP request. It is inserted when the request begins and gets its response in the
-- transaction that does the request's work, so a repeated request is answered from here.
CREATE TABLE {schema}.idempotency_keys (
    tenant_id        BIGINT      NOT NULL DEFAULT 0,
    key              TEXT        NOT NULL,
    -- SHA-256 of what was asked. The same key with another request is the client's error and not a repetition.
    request_hash     BYTEA       NOT NULL,
    status           TEXT        NOT NULL DEFAULT 'started' CHECK (status IN ('started', 'completed')),
    response_code    SMALLINT,
    response_headers JSONB,
    response_body    BYTEA,
    -- When the request that holds the key began; NULL once it is completed. An old one was left by a process that died.
    locked_at        TIMESTAMPTZ DEFAULT now(),
    created_at       TIMESTAMPTZ NOT NULL DEFAULT now(),
    expires_at       TIMESTAMPTZ NOT NULL DEFAULT now() + INTERVAL '24 hours',
    PRIMARY KEY (tenant_id, key),
    CHECK (status <> 'completed' OR response_code IS NOT NULL)
) WITH (
    -- Every row is inserted, updated once and deleted a day later.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = false,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 10000,
    toast.vacuum_truncate = false
);

CREATE INDEX idempotency_keys_expires_idx ON {schema}.idempotency_keys (expires_at);

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.idempotency_keys IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.idempotency_keys WHERE expires_at > now()) THEN
        RAISE EXCEPTION 'idempotency_keys holds keys that have not expired: without them a repeated request is done again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'wait until they have expired, or drop them on purpose: TRUNCATE idempotency_keys';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.idempotency_keys;
