-- One row for each Idempotency-Key of an HTTP request. It is inserted before the request's handler runs, and gets its response
-- in the transaction of the handler's work. A repeated request is answered from here.
CREATE TABLE {schema}.idempotency_keys (
    -- No default: a tenant that is left out by mistake would read the responses of another.
    tenant_id        BIGINT      NOT NULL,
    -- Who asked for what: method and path to be read, and a hash of principal, method, path and query.
    scope            TEXT        NOT NULL,
    key              TEXT        NOT NULL,
    -- SHA-256 of the request's body. The same key with another body is the client's error and not a repetition.
    request_hash     BYTEA       NOT NULL,
    -- The body as JSON, to be searched. NULL where jsonb cannot hold it: it is never replayed.
    response         JSONB,
    status_code      SMALLINT,
    state            TEXT        NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'completed', 'failed')),
    created_at       TIMESTAMPTZ NOT NULL DEFAULT now(),
    completed_at     TIMESTAMPTZ,
    expires_at       TIMESTAMPTZ NOT NULL DEFAULT now() + INTERVAL '24 hours',
    -- The response that is replayed, byte for byte. A NULL body of a response was too large to be stored.
    response_body    BYTEA,
    response_headers JSONB,
    -- Of the execution that owns the row. Another execution changes it, and the first can then store nothing.
    token            UUID        NOT NULL,
    -- Until then no other execution takes the request; NULL once there is a response. A handler in a transaction holds the row's
    -- lock instead.
    lease_until      TIMESTAMPTZ,
    PRIMARY KEY (tenant_id, scope, key),
    CHECK ((state = 'pending') = (status_code IS NULL))
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

---- create above / drop below ----

LOCK TABLE {schema}.idempotency_keys IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.idempotency_keys WHERE expires_at > now() OR lease_until > now()) THEN
        RAISE EXCEPTION 'idempotency_keys holds keys that have not expired: without them a repeated request is done again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'wait until they have expired, or drop them on purpose: TRUNCATE idempotency_keys';
    END IF;
END
$$;

DROP TABLE {schema}.idempotency_keys;
