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
-- A row's id may be too long for an index.
CREATE INDEX outbox_messages_dlq_row_idx ON {schema}.outbox_messages_dlq (hashtextextended(row_id, 0), outbox);

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

-- Requests to publish stored rows again, one row each: `walpost replay` writes it, the relay of the slot fulfils it. A relay
-- goes on from here after whatever ended its session, so a request is fulfilled once.
CREATE TABLE {schema}.outbox_replays (
    -- Ends the ids of the request's messages: "<source>/<table>/<id>/<hash>/replay-<replay_id>".
    replay_id      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The relay that is to fulfil it. Each shard of an outbox has its own, and publishes its own rows.
    slot           TEXT        NOT NULL,
    outbox         TEXT        NOT NULL,
    -- Which rows. NULL is every row. The times are those of processed_at, from since to before until.
    ids            TEXT[],
    event_types    TEXT[],
    aggregate_type TEXT,
    aggregate_id   TEXT,
    tenant_id      TEXT,
    since          TIMESTAMPTZ,
    until          TIMESTAMPTZ NOT NULL DEFAULT now(),
    -- NULL is the relay's own stream.
    to_stream      TEXT,
    state          TEXT        NOT NULL DEFAULT 'requested' CHECK (state IN ('requested', 'running', 'done', 'failed', 'cancelled')),
    requested_at   TIMESTAMPTZ NOT NULL DEFAULT now(),
    requested_by   TEXT        NOT NULL DEFAULT session_user,
    -- How many rows there were when it was requested, for a progress bar. NULL: they were not counted.
    total          BIGINT,
    sent           BIGINT      NOT NULL DEFAULT 0,
    refused        BIGINT      NOT NULL DEFAULT 0,
    -- The last row that was stored or refused, and a sequence of the stream behind which everything later stands. Both are
    -- written after the PubAcks.
    last_processed_at TIMESTAMPTZ,
    last_id           TEXT,
    stream_created    TIMESTAMPTZ,
    stream_sequence   BIGINT,
    last_error     TEXT,
    started_at     TIMESTAMPTZ,
    finished_at    TIMESTAMPTZ,
    -- What no relay could read would keep all later requests waiting.
    CHECK (array_position(ids, NULL) IS NULL AND array_position(event_types, NULL) IS NULL
        AND coalesce(array_ndims(ids), 1) = 1 AND coalesce(array_ndims(event_types), 1) = 1),
    CHECK (isfinite(since) IS NOT FALSE AND isfinite(until) AND isfinite(requested_at) AND isfinite(stream_created) IS NOT FALSE
        AND isfinite(started_at) IS NOT FALSE AND isfinite(finished_at) IS NOT FALSE),
    CHECK (until <= requested_at), -- else rows that are delivered meanwhile would be part of it
    CHECK (sent >= 0 AND refused >= 0 AND total >= 0 AND stream_sequence >= 0)
);

-- A relay asks every second.
CREATE INDEX outbox_replays_open_idx ON {schema}.outbox_replays (slot, replay_id) WHERE state IN ('requested', 'running');

-- With mark journal, what became of the rows of an outbox stands here, and the rows themselves are never changed: a mark
-- costs some bytes, and not a new version of the row.

-- The rows that are done with, many in a row of this table.
CREATE TABLE {schema}.outbox_journal (
    outbox       TEXT           NOT NULL,
    -- stored: their messages are in the stream. dead: they are dead letters. skipped: they were not to be sent.
    kind         TEXT           NOT NULL CHECK (kind IN ('stored', 'dead', 'skipped')),
    ids          INT8MULTIRANGE NOT NULL,
    processed_at TIMESTAMPTZ    NOT NULL DEFAULT now() CHECK (isfinite(processed_at))
);

-- Entries change where rows are made pending again, or deleted. Without a key that would fail in a database that has a
-- publication FOR ALL TABLES; a key would be one more index to write for each mark.
ALTER TABLE {schema}.outbox_journal REPLICA IDENTITY FULL;

-- Finds the entries of an id.
CREATE INDEX outbox_journal_ids_idx ON {schema}.outbox_journal USING gist (range_merge(ids));

-- A start looks for rows that the stream has lost among the newest entries.
CREATE INDEX outbox_journal_processed_idx ON {schema}.outbox_journal (processed_at, outbox);

-- The pending rows that are parked, held, or due later. A row that is in neither table is pending, too.
CREATE TABLE {schema}.outbox_deferred (
    outbox         TEXT        NOT NULL,
    id             BIGINT      NOT NULL,
    attempts       SMALLINT    NOT NULL DEFAULT 0,
    -- NULL: it is due later, and nothing else.
    last_error     TEXT,
    available_at   TIMESTAMPTZ,
    -- A hash of what tells aggregates apart.
    aggregate_hash BIGINT,
    -- The partition that has the row, or the table: a row of a partition that is detached is not gone.
    partition_oid  OID,
    PRIMARY KEY (outbox, id)
);

CREATE INDEX outbox_deferred_due_idx ON {schema}.outbox_deferred (outbox, available_at, id);

CREATE INDEX outbox_deferred_aggregate_idx ON {schema}.outbox_deferred (outbox, aggregate_hash) WHERE last_error IS NOT NULL;

-- By what outboxes are known, whatever becomes of the names of tables, schemas and databases: one row for each outbox and condition.
CREATE TABLE {schema}.outbox_known (
    id           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Its name for ever: as "schema.table" when it was first delivered, or outboxes[].name.
    outbox       TEXT        NOT NULL,
    -- outboxes[].where. Empty: every row.
    condition    TEXT        NOT NULL,
    -- What the progress was computed for. When one of these is another, the whole table is searched once. own_oid is this table:
    -- of rows that a dump has brought, OIDs say nothing. partitions is a hash of their OIDs, and of the transactions that attached them.
    system_id    TEXT,
    database_oid OID         NOT NULL,
    own_oid      OID         NOT NULL,
    table_oid    OID         NOT NULL,
    journal_oid  OID,
    timeline     INT         NOT NULL,
    partitions   BIGINT      NOT NULL,
    -- The table as "schema.table", when it was seen last. Empty: another table has that name.
    table_name   TEXT        NOT NULL,
    -- The default source at the first start in this database.
    source       TEXT        NOT NULL,
    -- With mark journal: the ids that searches for pending rows look at. A row with another id is in outbox_journal or
    -- outbox_deferred, or was never committed. Holes below the last range are ids whose transactions may still be open.
    unsettled    INT8MULTIRANGE NOT NULL DEFAULT '{[-9223372036854775808,)}',
    -- The ids of partitions that retention has dropped and whose entries it has not deleted yet.
    dropped      INT8MULTIRANGE NOT NULL DEFAULT '{}',
    updated_at   TIMESTAMPTZ    NOT NULL DEFAULT now()
) WITH (fillfactor = 50); -- updates stay in their page

-- A condition may be too long for an index.
CREATE UNIQUE INDEX outbox_known_outbox_idx ON {schema}.outbox_known (outbox, hashtextextended(condition, 0));

-- Outboxes with such a mark have triggers with this function, for UPDATE and TRUNCATE.
CREATE FUNCTION {schema}.outbox_append_only() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION '%.% is append-only: % is refused', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_OP USING
        ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'an event is never changed: insert another one; a row that is not to be sent may be deleted';
END
$$;

-- What a relay remembers of an outbox that it delivers: one row for each outbox, source, shard, condition and stream. A first
-- start is made once, whatever became of slots, marks and messages since.
CREATE TABLE {schema}.outbox_sent (
    id        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox    TEXT        NOT NULL,
    source    TEXT        NOT NULL,
    -- As in 1/4. Empty: every row.
    shard     TEXT        NOT NULL,
    -- outboxes[].where. Empty: every row.
    condition TEXT        NOT NULL,
    stream    TEXT        NOT NULL,
    domain    TEXT        NOT NULL,
    slot      TEXT        NOT NULL,
    -- What became of the rows that were pending then: pending is published, none is marked as processed.
    initial   TEXT        NOT NULL CHECK (initial IN ('pending', 'none')),
    -- NULL: the next start is a first one.
    begun_at  TIMESTAMPTZ,
    -- By what the publication has the table since all earlier rows were answered: the slot brings every later one. NULL: the rows
    -- are left to the table until then.
    published_as TEXT,
    -- What the session has noted that delivers now, or did last. stream_created tells the stream from another one of its name.
    stream_created TIMESTAMPTZ,
    -- The last message of this source in the stream when the session began, its Nats-Msg-Id, and when JetStream stored it, which no
    -- publisher can choose. All rows that were marked at read_at had been compared with the stream. NULL: they could not be, or the clock has gone back since.
    read_sequence  BIGINT CHECK (read_sequence >= 0),
    read_message   TEXT,
    read_stored_at TIMESTAMPTZ,
    read_at        TIMESTAMPTZ,
    -- The rows of all messages up to there are settled. It is written once a second at most.
    last_sequence  BIGINT CHECK (last_sequence >= 0),
    noted_at       TIMESTAMPTZ,
    -- When the relay stopped. NULL: it runs, it crashed, or the clock has gone back.
    ended_at       TIMESTAMPTZ,
    -- The times of all its sessions. Sessions that follow each other are one time, unless another delivery of the outbox began between
    -- them. The last one has no end while it runs, or if it crashed and no other delivery has begun since.
    delivered      TSTZMULTIRANGE NOT NULL DEFAULT '{}',
    -- What its messages were like so far, by the first sequence of each: the subject, the format, and the headers that columns become.
    forms          JSONB NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(forms) = 'array'),
    CHECK (isfinite(stream_created) IS NOT FALSE AND isfinite(read_at) IS NOT FALSE
        AND isfinite(read_stored_at) IS NOT FALSE
        AND isfinite(noted_at) IS NOT FALSE AND isfinite(ended_at) IS NOT FALSE)
) WITH (fillfactor = 50); -- updates stay in their page

-- Relays remember in these tables what they deliver.
CREATE FUNCTION {schema}.outbox_no_truncate() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'TRUNCATE of %.% is refused', TG_TABLE_SCHEMA, TG_TABLE_NAME USING
        ERRCODE = 'object_not_in_prerequisite_state', HINT = TG_ARGV[0];
END
$$;

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_messages_dlq
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('walpost dlq discard deletes dead letters');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_messages_archive
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('drop its partitions, or let walpost retention do that');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_messages_archive_default
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('drop partitions of the archive, or let walpost retention do that');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_replays
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('walpost replay cancel ends a request');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_journal
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('without it a relay delivers again what it has delivered');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_deferred
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('without it a relay forgets which rows have failed, and which wait for those');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_known
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('walpost outbox forget deletes what is known of an outbox');

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_sent
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_no_truncate('walpost outbox forget deletes what is known of an outbox');

-- ALWAYS: also in a session that applies another server's changes.
ALTER TABLE {schema}.outbox_messages_dlq ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_messages_archive ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_messages_archive_default ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_replays ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_journal ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_deferred ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_known ENABLE ALWAYS TRIGGER outbox_no_truncate;

ALTER TABLE {schema}.outbox_sent ENABLE ALWAYS TRIGGER outbox_no_truncate;

---- create above / drop below ----

-- Locked before they are read: a relay could insert between the look and the DROP.
LOCK TABLE {schema}.outbox_messages_dlq, {schema}.outbox_replays, {schema}.outbox_journal, {schema}.outbox_deferred,
    {schema}.outbox_known, {schema}.outbox_sent IN ACCESS EXCLUSIVE MODE;

DO $$
DECLARE
    dead       BIGINT;
    unfinished BIGINT;
BEGIN
    SELECT count(*) INTO dead FROM {schema}.outbox_messages_dlq;
    IF dead > 0 THEN
        RAISE EXCEPTION 'outbox_messages_dlq holds % undelivered row(s)', dead USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'retry or discard the dead letters first';
    END IF;
    SELECT count(*) INTO unfinished FROM {schema}.outbox_replays WHERE state IN ('requested', 'running');
    IF unfinished > 0 THEN
        RAISE EXCEPTION 'outbox_replays holds % unfinished request(s)', unfinished USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'wait for them, or end them: walpost replay list, walpost replay cancel';
    END IF;
    IF EXISTS (SELECT FROM {schema}.outbox_journal) THEN
        RAISE EXCEPTION 'outbox_journal says which events were delivered: without it a relay delivers them again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no outbox has mark journal any more: DELETE FROM outbox_journal';
    END IF;
END
$$;

-- Everything in the archive was delivered. Its partitions go with it.
DROP TABLE {schema}.outbox_messages_dlq, {schema}.outbox_messages_archive, {schema}.outbox_replays, {schema}.outbox_journal,
    {schema}.outbox_deferred, {schema}.outbox_known, {schema}.outbox_sent;

DROP FUNCTION {schema}.outbox_append_only(), {schema}.outbox_no_truncate();
