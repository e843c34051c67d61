-- +goose Up
-- What package consume keeps beside its offsets: which events were handled, and which could not be.
SET LOCAL lock_timeout = '5s';

-- A stream that was recreated has the sequences of the old one again. Each partition says which stream its own are of,
-- because partitions move into another stream one after the other. The definition has the latest.
ALTER TABLE {schema}.consumer_offsets ADD COLUMN stream_created_at TIMESTAMPTZ;

-- The events that were handled, so that one that is stored twice takes effect once.
CREATE TABLE {schema}.consumer_seen (
    -- A hash of consumer, ce-source and ce-id: 16 bytes.
    id            UUID PRIMARY KEY,
    consumer_name TEXT        NOT NULL,
    -- When the stream stored the event. Rows are deleted when every partition of the consumer is long past it.
    stored_at     TIMESTAMPTZ NOT NULL
) WITH (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Rows are inserted in about the order of their time, and deleted in it.
CREATE INDEX consumer_seen_stored_at ON {schema}.consumer_seen USING brin (stored_at) WITH (pages_per_range = 32);

-- The events that a handler failed at, whole: the stream's limits may delete theirs. Later events of the same aggregate wait
-- behind them.
CREATE TABLE {schema}.consumer_parked (
    -- The order of the events of an aggregate.
    number          BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_name   TEXT        NOT NULL,
    -- The event's partition is this modulo the number of partitions.
    partition_hash  BIGINT      NOT NULL,
    -- The aggregate's name as the partition's hash has it. NULL: the event belongs to none, and none waits behind it.
    aggregate       BYTEA,
    sequence        BIGINT      NOT NULL,
    event_source    TEXT        NOT NULL,
    event_id        TEXT        NOT NULL,
    event_type      TEXT        NOT NULL,
    -- The event as JSON, its payload in base64.
    event           BYTEA       NOT NULL,
    -- How often a handler failed at it; 0 waits behind another event.
    attempts        INTEGER     NOT NULL DEFAULT 0,
    last_error      TEXT,
    parked_at       TIMESTAMPTZ NOT NULL DEFAULT now(),
    next_attempt_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    -- When it became a dead letter: it is not tried again, and nothing waits behind it.
    dead_at         TIMESTAMPTZ
);

CREATE INDEX consumer_parked_aggregate ON {schema}.consumer_parked (consumer_name, aggregate, number) WHERE dead_at IS NULL;
CREATE INDEX consumer_parked_dead ON {schema}.consumer_parked (consumer_name, dead_at) WHERE dead_at IS NOT NULL;

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.consumer_seen, {schema}.consumer_parked IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_parked) THEN
        RAISE EXCEPTION 'consumer_parked holds events that were not handled' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'copy what you need, then empty the table: TRUNCATE consumer_parked';
    END IF;
    IF EXISTS (SELECT FROM {schema}.consumer_seen) THEN
        RAISE EXCEPTION 'consumer_seen holds the ids of handled events: without them a repeated event is handled again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no consumer needs them any more: TRUNCATE consumer_seen';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.consumer_seen, {schema}.consumer_parked;
ALTER TABLE {schema}.consumer_offsets DROP COLUMN stream_created_at;
