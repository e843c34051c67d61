-- +goose Up
-- What package consume keeps beside its offsets: which events were handled, and which could not be.
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.consumer_definitions, {schema}.consumer_offsets IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_definitions) THEN
        RAISE EXCEPTION 'consumer_definitions holds rows, and no version of walpost wrote them' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'copy what you need, then empty the table: TRUNCATE consumer_definitions';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.consumer_definitions;

-- What a consumer is, so that all its processes agree: one row per consumer. A process that has another definition waits
-- until no process with this one runs, and then changes the row.
CREATE TABLE {schema}.consumer_definitions (
    consumer_name   TEXT PRIMARY KEY CHECK (consumer_name <> ''),
    stream          TEXT        NOT NULL,
    -- The events of one aggregate are handled in one partition, one after the other.
    partitions      INTEGER     NOT NULL CHECK (partitions > 0),
    -- How an aggregate is assigned to a partition.
    partition_hash  TEXT        NOT NULL DEFAULT 'fnv1a32',
    -- Subjects with wildcards; empty is every subject. A change counts from the offsets on.
    filter_subjects TEXT[]      NOT NULL DEFAULT '{}',
    -- Where the consumer began: what was asked for, such as 'all', 'new' or a time, and the offset that it came to, which
    -- is the same in every partition.
    start_at        TEXT        NOT NULL,
    start_sequence  BIGINT      NOT NULL CHECK (start_sequence >= 0),
    created_at      TIMESTAMPTZ NOT NULL DEFAULT now(),
    changed_at      TIMESTAMPTZ NOT NULL DEFAULT now()
);

-- A stream that was recreated has the sequences of the old one again. Each partition says which stream its own are of,
-- because partitions move into another stream one after the other.
ALTER TABLE {schema}.consumer_offsets ADD COLUMN stream_created_at TIMESTAMPTZ;

-- The events that were handled, so that one that is stored twice takes effect once.
CREATE TABLE {schema}.consumer_seen (
    -- A hash of consumer, ce-source and ce-id: 16 bytes.
    id            UUID PRIMARY KEY,
    consumer_name TEXT        NOT NULL,
    -- When the stream stored the event. Rows are deleted when every partition of the consumer is long past it.
    stored_at     TIMESTAMPTZ NOT NULL
) WITH (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Finds the rows to be deleted.
CREATE INDEX consumer_seen_stored_at ON {schema}.consumer_seen (consumer_name, stored_at);

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

LOCK TABLE {schema}.consumer_definitions, {schema}.consumer_offsets, {schema}.consumer_seen, {schema}.consumer_parked
    IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_definitions) THEN
        RAISE EXCEPTION 'consumer_definitions holds consumers, whose positions are in consumer_offsets' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no consumer needs its position any more: TRUNCATE consumer_offsets, consumer_definitions';
    END IF;
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

DROP TABLE {schema}.consumer_seen, {schema}.consumer_parked, {schema}.consumer_definitions;
ALTER TABLE {schema}.consumer_offsets DROP COLUMN stream_created_at;

-- The table of version 6 again.
CREATE TABLE {schema}.consumer_definitions (
    consumer_name       TEXT PRIMARY KEY CHECK (consumer_name <> ''),
    stream              TEXT        NOT NULL,
    stream_created_at   TIMESTAMPTZ,
    partitions          INTEGER     NOT NULL CHECK (partitions > 0),
    partition_hash      TEXT        NOT NULL DEFAULT 'fnv1a32',
    filter_subjects     TEXT[]      NOT NULL DEFAULT '{}',
    start_at            TEXT        NOT NULL,
    start_sequence      BIGINT      NOT NULL CHECK (start_sequence >= 0),
    previous_partitions INTEGER,
    previous_offsets    BIGINT[],
    created_at          TIMESTAMPTZ NOT NULL DEFAULT now(),
    changed_at          TIMESTAMPTZ NOT NULL DEFAULT now(),
    CHECK ((previous_partitions IS NULL) = (previous_offsets IS NULL)),
    CHECK (cardinality(previous_offsets) = previous_partitions)
);
