-- +goose Up
-- Delivered rows after their time in the outbox. Partitioned by month, so that old months are dropped as whole tables
-- instead of being deleted row by row. The months are made by retention, before it moves rows into them.
CREATE TABLE {schema}.outbox_messages_archive (
    -- Where the row came from, as "schema.table": one archive for all outboxes.
    outbox         TEXT        NOT NULL,
    id             BIGINT      NOT NULL,
    -- From here on as the outbox had it, and nothing is checked or defaulted again: a row that the archive refused would
    -- fail every pass for ever.
    tenant_id      BIGINT,
    aggregate_type TEXT,
    aggregate_id   BIGINT,
    event_type     TEXT,
    event_version  SMALLINT,
    payload        JSONB,
    occurred_at    TIMESTAMPTZ,
    available_at   TIMESTAMPTZ,
    -- NOT NULL is the law: only what was delivered is archived, and so only what was delivered is ever dropped with a month.
    processed_at   TIMESTAMPTZ NOT NULL,
    attempts       SMALLINT,
    last_error     TEXT,
    trace_id       TEXT,
    archived_at    TIMESTAMPTZ NOT NULL DEFAULT now()
) PARTITION BY RANGE (occurred_at);

-- Not unique: an id that comes again, after TRUNCATE ... RESTART IDENTITY or a failover, is another event and is archived too.
CREATE INDEX outbox_messages_archive_row_idx ON {schema}.outbox_messages_archive (outbox, id);

-- "Is anything in this month still young?" and "what is old in the default partition?", each in one look.
CREATE INDEX outbox_messages_archive_processed_idx ON {schema}.outbox_messages_archive (processed_at);

-- Takes what no month takes, a producer's clock in the year 2099 for one: without it such a row would fail every archive
-- pass for ever.
CREATE TABLE {schema}.outbox_messages_archive_default PARTITION OF {schema}.outbox_messages_archive DEFAULT;

-- Old rows are deleted from it one by one. Without a key that would fail in a database that has a publication FOR ALL TABLES.
ALTER TABLE {schema}.outbox_messages_archive_default REPLICA IDENTITY FULL;

-- +goose Down
SET LOCAL lock_timeout = '5s';

-- Everything in it was delivered, so nothing is lost that a consumer has not had. Its partitions go with it.
DROP TABLE {schema}.outbox_messages_archive;
