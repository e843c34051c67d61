-- The tables of the shop, beside those of `walpost migrate up`.

-- The order service.
CREATE TABLE orders (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  BIGINT      NOT NULL,
    public_id  UUID        NOT NULL DEFAULT gen_random_uuid(),
    -- The client's own number. It is not unique here: two orders with one would show that a request was executed twice.
    client_ref TEXT        NOT NULL,
    total      INTEGER     NOT NULL,
    state      TEXT        NOT NULL DEFAULT 'placed',
    version    INTEGER     NOT NULL DEFAULT 1,
    UNIQUE (tenant_id, public_id)
);

-- The read model: one row for each order, as its latest event says.
CREATE TABLE order_view (
    tenant_id BIGINT  NOT NULL,
    public_id UUID    NOT NULL,
    total     INTEGER NOT NULL,
    state     TEXT    NOT NULL,
    version   INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, public_id)
);

-- Each effect on the read model, in the order in which they happened. The shop is judged by it.
CREATE TABLE order_view_log (
    number    BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    public_id UUID    NOT NULL,
    version   INTEGER NOT NULL
);

-- How far the read model is, by event type.
CREATE TABLE projection_status (
    event_type      TEXT PRIMARY KEY,
    events          BIGINT      NOT NULL,
    last_event_id   TEXT        NOT NULL,
    last_event_at   TIMESTAMPTZ NOT NULL, -- when it was stored
    projected_at    TIMESTAMPTZ NOT NULL
);

-- The payment consumer: what it asked its provider for.
CREATE TABLE payments (
    order_id   BIGINT PRIMARY KEY,
    key        TEXT        NOT NULL,
    amount     INTEGER     NOT NULL,
    state      TEXT        NOT NULL DEFAULT 'pending',
    created_at TIMESTAMPTZ NOT NULL DEFAULT now()
);

-- The audit log: append only, a partition for each month.
CREATE TABLE audit_log (
    at         TIMESTAMPTZ NOT NULL,
    event_id   TEXT        NOT NULL,
    event_type TEXT        NOT NULL,
    tenant_id  BIGINT      NOT NULL,
    order_id   BIGINT      NOT NULL,
    before     JSONB,
    after      JSONB       NOT NULL
) PARTITION BY RANGE (at);

CREATE FUNCTION audit_log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit_log is append only';
END
$$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION audit_log_is_append_only();
