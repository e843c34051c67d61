-- +goose Up
-- The positions of consumers get their final columns: one row per consumer and partition. The table of version 4 was never
-- used by walpost. Where something else has used it, it is not dropped.
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.consumer_offsets IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_offsets) THEN
        RAISE EXCEPTION 'consumer_offsets holds rows, and no version of walpost wrote them' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'copy what you need, then empty the table: TRUNCATE consumer_offsets';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.consumer_offsets;

-- What a consumer is, so that all its members agree: one row per consumer. A member that has another definition waits until
-- no member with this one runs, and then changes the row.
CREATE TABLE {schema}.consumer_definitions (
    consumer_name       TEXT PRIMARY KEY CHECK (consumer_name <> ''),
    stream              TEXT        NOT NULL,
    -- When the stream was created, as the server tells. Another time means another stream of that name, whose sequences
    -- began again. NULL until a member has connected.
    stream_created_at   TIMESTAMPTZ,
    -- The events of one aggregate are handled in one partition, one after the other.
    partitions          INTEGER     NOT NULL CHECK (partitions > 0),
    -- How an aggregate is assigned to a partition.
    partition_hash      TEXT        NOT NULL DEFAULT 'fnv1a32',
    -- Subjects with wildcards; empty is every subject. A change counts from the offsets on.
    filter_subjects     TEXT[]      NOT NULL DEFAULT '{}',
    -- Where the consumer began: what was asked for, such as 'all', 'new' or a time, and the offset that it came to, which is
    -- the same in every partition.
    start_at            TEXT        NOT NULL,
    start_sequence      BIGINT      NOT NULL CHECK (start_sequence >= 0),
    -- Until every partition has passed them: the number of partitions before the last change, and their offsets, that of
    -- partition 0 first. An event was handled if its sequence is not above the offset of its partition of that time.
    previous_partitions INTEGER,
    previous_offsets    BIGINT[],
    created_at          TIMESTAMPTZ NOT NULL DEFAULT now(),
    changed_at          TIMESTAMPTZ NOT NULL DEFAULT now(),
    CHECK ((previous_partitions IS NULL) = (previous_offsets IS NULL)),
    CHECK (cardinality(previous_offsets) = previous_partitions)
);

-- How far each partition of a consumer has come. It is advanced in the transaction of the handler's own work, so the work takes
-- effect once.
CREATE TABLE {schema}.consumer_offsets (
    consumer_name     TEXT        NOT NULL,
    -- 0 to partitions - 1.
    partition_key     INTEGER     NOT NULL DEFAULT 0 CHECK (partition_key >= 0),
    -- The stream sequence up to which everything of the partition is settled; 0 before the first message. Not an id of the
    -- outbox: these are handed out before the commit, and "id > last" would pass over a transaction that commits late.
    last_processed_id BIGINT      NOT NULL DEFAULT 0 CHECK (last_processed_id >= 0),
    -- When that was. NULL before the first message.
    last_processed_at TIMESTAMPTZ,
    -- Raised by every takeover and every rewind: who holds an older one changes nothing here.
    epoch             BIGINT      NOT NULL DEFAULT 0,
    -- The last message of the stream that existed at or before last_processed_id: its sequence, its Nats-Msg-Id, when the
    -- stream stored it, and its Walpost-Position. A stream that has another message there was restored or replaced.
    anchor_sequence   BIGINT,
    anchor_message_id TEXT,
    anchor_stored_at  TIMESTAMPTZ,
    anchor_position   TEXT,
    PRIMARY KEY (consumer_name, partition_key),
    CHECK (anchor_sequence <= last_processed_id)
) WITH (
    -- A few rows, each updated for every batch, no indexed column among the changes: with room in the page the updates are
    -- HOT and clean up after themselves.
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = false
);

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.consumer_definitions, {schema}.consumer_offsets IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_offsets) OR EXISTS (SELECT FROM {schema}.consumer_definitions) THEN
        RAISE EXCEPTION 'consumer_offsets holds the positions of consumers: without them each handles its stream again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no consumer needs its position any more: TRUNCATE consumer_offsets, consumer_definitions';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.consumer_offsets, {schema}.consumer_definitions;

-- The table of version 4 again.
CREATE TABLE {schema}.consumer_offsets (
    consumer      TEXT        NOT NULL,
    stream        TEXT        NOT NULL,
    last_sequence BIGINT      NOT NULL DEFAULT 0,
    message_id    TEXT,
    position      TEXT,
    updated_at    TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, stream)
) WITH (
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = false
);
