-- +goose Up
-- With mark journal, what became of the rows of an outbox stands here, and the rows themselves are never changed: a mark
-- costs some bytes, and not a new version of the row.

-- The rows that are done with, many in a row of this table.
CREATE TABLE {schema}.outbox_journal (
    outbox       TEXT           NOT NULL,
    -- stored: their messages are in the stream. dead: they are dead letters. skipped: they were not to be sent.
    kind         TEXT           NOT NULL CHECK (kind IN ('stored', 'dead', 'skipped')),
    ids          INT8MULTIRANGE NOT NULL,
    processed_at TIMESTAMPTZ    NOT NULL DEFAULT now()
);

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
    PRIMARY KEY (outbox, id)
);

CREATE INDEX outbox_deferred_due_idx ON {schema}.outbox_deferred (outbox, available_at, id);

CREATE INDEX outbox_deferred_aggregate_idx ON {schema}.outbox_deferred (outbox, aggregate_hash) WHERE last_error IS NOT NULL;

-- Up to which id every row of an outbox is in one of the two, or was never committed, but for holes: ids whose transactions may
-- still be open. Searches for pending rows look at holes, and above settled_to.
CREATE TABLE {schema}.outbox_progress (
    outbox     TEXT PRIMARY KEY,
    settled_to BIGINT         NOT NULL,
    holes      INT8MULTIRANGE NOT NULL DEFAULT '{}',
    updated_at TIMESTAMPTZ    NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- Outboxes with such a mark have triggers with this function, for UPDATE and TRUNCATE.
-- +goose StatementBegin
CREATE FUNCTION {schema}.outbox_append_only() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION '%.% is append-only: % is refused', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_OP USING
        ERRCODE = 'object_not_in_prerequisite_state',
        HINT = 'an event is never changed: insert another one; a row that is not to be sent may be deleted';
END
$$;
-- +goose StatementEnd

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.outbox_journal, {schema}.outbox_deferred, {schema}.outbox_progress IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.outbox_journal) THEN
        RAISE EXCEPTION 'outbox_journal says which events were delivered: without it a relay delivers them again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no outbox has mark journal any more: TRUNCATE outbox_journal, outbox_deferred, outbox_progress';
    END IF;
END
$$;
-- +goose StatementEnd

DROP FUNCTION {schema}.outbox_append_only();

DROP TABLE {schema}.outbox_progress;

DROP TABLE {schema}.outbox_deferred;

DROP TABLE {schema}.outbox_journal;
