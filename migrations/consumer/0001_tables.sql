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
    -- When the partition's stream was created. A stream that was recreated has the sequences of the old one again, and
    -- partitions move into another stream one after the other.
    stream_created_at TIMESTAMPTZ,
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

-- An aggregate's name may be too long for an index.
CREATE INDEX consumer_parked_aggregate ON {schema}.consumer_parked (consumer_name, sha256(aggregate), number) WHERE dead_at IS NULL;
CREATE INDEX consumer_parked_dead ON {schema}.consumer_parked (consumer_name, dead_at) WHERE dead_at IS NOT NULL;

-- What a consumer in another language than Go calls: docs/CONSUME.md, "Other languages". The functions run with the caller's
-- rights.

-- The partition of an event, as package consume computes it: FNV-1a of the aggregate's name, modulo the number of partitions.
CREATE FUNCTION {schema}.walpost_partition(tenant_id TEXT, aggregate_type TEXT, aggregate_id TEXT, event_id TEXT, partitions INTEGER)
RETURNS INTEGER LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
DECLARE
    name BYTEA := '';
    part TEXT;
    hash BIGINT := 2166136261;
BEGIN
    IF coalesce(aggregate_id, '') = '' THEN
        name := convert_to(coalesce(event_id, ''), 'UTF8');
    ELSE
        FOREACH part IN ARRAY ARRAY[tenant_id, aggregate_type, aggregate_id] LOOP
            IF coalesce(part, '') <> '' THEN
                name := name || convert_to(length(convert_to(part, 'UTF8')) || ':' || part, 'UTF8');
            END IF;
            name := name || '/'::bytea;
        END LOOP;
    END IF;
    FOR i IN 0 .. length(name) - 1 LOOP
        hash := ((hash # get_byte(name, i)) * 16777619) & 4294967295;
    END LOOP;
    RETURN hash % partitions;
END
$$;

-- Makes the rows of a consumer that is not there yet. sequence is that of the last message before its first one.
CREATE FUNCTION {schema}.walpost_define(consumer TEXT, stream_name TEXT, partitions INTEGER, sequence BIGINT)
RETURNS VOID LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    have RECORD;
BEGIN
    INSERT INTO {schema}.consumer_definitions (consumer_name, stream, partitions, start_at, start_sequence)
        VALUES (consumer, stream_name, partitions, sequence::text, sequence) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO {schema}.consumer_offsets (consumer_name, partition_key, last_processed_id)
            SELECT consumer, n, sequence FROM generate_series(0, partitions - 1) n;
    END IF;
    SELECT d.stream, d.partitions INTO have FROM {schema}.consumer_definitions d WHERE d.consumer_name = consumer;
    IF have.stream <> stream_name OR have.partitions <> partitions THEN
        RAISE EXCEPTION 'consumer % reads stream % in % partitions', consumer, have.stream, have.partitions USING
            ERRCODE = 'invalid_parameter_value', HINT = 'choose another name, or use its stream and partitions';
    END IF;
END
$$;

-- Takes a partition for this connection, which has to be a direct one that stays open. No row: another process has it. The
-- epoch is for walpost_claim and walpost_advance; reading begins behind the sequence. While the connection is open, no
-- process changes the number of partitions.
CREATE FUNCTION {schema}.walpost_take(consumer TEXT, partition INTEGER, partitions INTEGER, OUT epoch BIGINT, OUT sequence BIGINT)
RETURNS SETOF RECORD LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    prefix  BYTEA;
    members BIGINT;
    owner   BIGINT;
BEGIN
    -- The keys are those of package consume.
    SELECT convert_to('walpost consume', 'UTF8') || '\x00' || convert_to(n.nspname, 'UTF8') || '\x00'
            || convert_to(consumer, 'UTF8') || '\x00' INTO prefix
        FROM {schema}.consumer_offsets o JOIN pg_class c ON c.oid = o.tableoid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE o.consumer_name = consumer AND o.partition_key = partition;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'consumer % has no partition %', consumer, partition USING
            ERRCODE = 'invalid_parameter_value', HINT = 'call walpost_define first; partitions count from 0';
    END IF;
    members := ('x' || left(encode(sha256(prefix || '-1'), 'hex'), 16))::bit(64)::bigint;
    owner := ('x' || left(encode(sha256(prefix || convert_to(partition::text, 'UTF8')), 'hex'), 16))::bit(64)::bigint;
    IF NOT EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.pid = pg_backend_pid() AND l.objsubid = 1
            AND (l.classid::bigint << 32 | l.objid::bigint) = members) THEN
        PERFORM pg_advisory_lock_shared(members);
    END IF;
    IF NOT EXISTS (SELECT FROM {schema}.consumer_definitions d WHERE d.consumer_name = consumer AND d.partitions = walpost_take.partitions) THEN
        RAISE EXCEPTION 'consumer % has not % partitions', consumer, partitions USING
            ERRCODE = 'invalid_parameter_value', HINT = 'SELECT partitions FROM consumer_definitions';
    END IF;
    IF NOT pg_try_advisory_lock(owner) THEN
        RETURN;
    END IF;
    RETURN QUERY UPDATE {schema}.consumer_offsets o SET epoch = o.epoch + 1
        WHERE o.consumer_name = consumer AND o.partition_key = partition
        RETURNING o.epoch, o.last_processed_id;
END
$$;

-- Begins the work of a transaction on a partition: locks its row, and returns the sequence up to which events are settled.
-- NULL: another process has taken the partition.
CREATE FUNCTION {schema}.walpost_claim(consumer TEXT, partition INTEGER, owner_epoch BIGINT)
RETURNS BIGINT LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    settled BIGINT;
BEGIN
    SELECT o.last_processed_id INTO settled FROM {schema}.consumer_offsets o
        WHERE o.consumer_name = consumer AND o.partition_key = partition AND o.epoch = owner_epoch FOR UPDATE;
    IF FOUND THEN
        PERFORM set_config('walpost.claim', pg_current_xact_id()::text || '/' || partition || '/' || consumer, true);
    END IF;
    RETURN settled;
END
$$;

-- Settles an event in the transaction of its effect. 'apply': the effect is to be made, now and in this transaction. 'skip': the
-- event had its effect. 'fenced': another process has taken the partition; roll back. It fails where walpost_claim was not called in
-- this transaction: a driver that commits each statement would lose the effect.
CREATE FUNCTION {schema}.walpost_advance(
    consumer TEXT, partition INTEGER, owner_epoch BIGINT, sequence BIGINT, source TEXT, id TEXT, stored_at TIMESTAMPTZ)
RETURNS TEXT LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    settled BIGINT;
    seen    UUID;
BEGIN
    IF current_setting('walpost.claim', true) IS DISTINCT FROM
            pg_current_xact_id()::text || '/' || partition || '/' || consumer THEN
        RAISE EXCEPTION 'partition % of consumer % was not claimed in this transaction', partition, consumer USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'call walpost_claim first, in the same transaction; switch autocommit off';
    END IF;
    IF coalesce(id, '') = '' THEN
        RAISE EXCEPTION 'the event has no id' USING ERRCODE = 'invalid_parameter_value', HINT = 'give its ce-id';
    END IF;
    SELECT o.last_processed_id INTO settled FROM {schema}.consumer_offsets o
        WHERE o.consumer_name = consumer AND o.partition_key = partition AND o.epoch = owner_epoch;
    IF NOT FOUND THEN
        RETURN 'fenced';
    ELSIF sequence <= settled THEN
        RETURN 'skip';
    END IF;
    UPDATE {schema}.consumer_offsets o SET last_processed_id = sequence, last_processed_at = now()
        WHERE o.consumer_name = consumer AND o.partition_key = partition;
    SELECT encode(substring(sha256(string_agg(int8send(length(p)::bigint) || p, ''::bytea ORDER BY n)) FOR 16), 'hex')::uuid INTO seen
        FROM (VALUES (1, convert_to(consumer, 'UTF8')), (2, convert_to(coalesce(source, ''), 'UTF8')), (3, convert_to(id, 'UTF8')))
            v (n, p);
    INSERT INTO {schema}.consumer_seen AS s (id, consumer_name, stored_at) VALUES (seen, consumer, stored_at) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN 'apply';
    END IF;
    RETURN 'skip';
END
$$;

---- create above / drop below ----

LOCK TABLE {schema}.consumer_definitions, {schema}.consumer_offsets, {schema}.consumer_seen, {schema}.consumer_parked
    IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_offsets) OR EXISTS (SELECT FROM {schema}.consumer_definitions) THEN
        RAISE EXCEPTION 'consumer_offsets holds the positions of consumers: without them each handles its stream again' USING
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

DROP FUNCTION {schema}.walpost_partition, {schema}.walpost_define, {schema}.walpost_take, {schema}.walpost_claim,
    {schema}.walpost_advance;

DROP TABLE {schema}.consumer_definitions, {schema}.consumer_offsets, {schema}.consumer_seen, {schema}.consumer_parked;
