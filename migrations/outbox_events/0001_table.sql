-- The append-only outbox: layout append, mark journal. A producer inserts here in the transaction that changes its own tables.
-- A row is never changed: what became of it stands in outbox_journal and outbox_deferred.
CREATE TABLE {schema}.outbox_events (
    -- ALWAYS: ids are drawn one by one and come once. A search for pending rows begins behind the id up to which all are done.
    id                BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- 0 is the tenant of applications that have none. Never NULL: order is kept per (tenant_id, aggregate_type,
    -- aggregate_id), and NULL equals nothing.
    tenant_id         BIGINT      NOT NULL DEFAULT 0,
    aggregate_type    TEXT        NOT NULL,
    aggregate_id      TEXT        NOT NULL,
    aggregate_version BIGINT,
    event_type        TEXT        NOT NULL,
    event_version     SMALLINT    NOT NULL DEFAULT 1,
    payload           JSONB       NOT NULL,
    -- An object: each key becomes a header.
    headers           JSONB,
    occurred_at       TIMESTAMPTZ NOT NULL DEFAULT now(),
    -- NULL: at once. A row whose available_at lies in the future is delivered then, and holds nobody until then.
    available_at      TIMESTAMPTZ,
    trace_id          TEXT
) PARTITION BY RANGE (id);

-- Nothing in a partition ever changes: vacuum has nothing to do there but to freeze.
CREATE TABLE {schema}.outbox_events_1000000 PARTITION OF {schema}.outbox_events FOR VALUES FROM (MINVALUE) TO (1000001)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

CREATE TABLE {schema}.outbox_events_2000000 PARTITION OF {schema}.outbox_events FOR VALUES FROM (1000001) TO (2000001)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

-- What lies beyond the partitions that retention has cut.
CREATE TABLE {schema}.outbox_events_rest PARTITION OF {schema}.outbox_events FOR VALUES FROM (2000001) TO (MAXVALUE)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

CREATE TRIGGER outbox_no_update BEFORE UPDATE ON {schema}.outbox_events
    FOR EACH ROW EXECUTE FUNCTION {schema}.outbox_append_only();

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_events
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_append_only();

-- ALWAYS: also in a session that applies another server's changes.
ALTER TABLE {schema}.outbox_events ENABLE ALWAYS TRIGGER outbox_no_update;

ALTER TABLE {schema}.outbox_events ENABLE ALWAYS TRIGGER outbox_no_truncate;

-- A partition takes over only triggers for rows.
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_events_1000000
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_append_only();

ALTER TABLE {schema}.outbox_events_1000000 ENABLE ALWAYS TRIGGER outbox_no_truncate;

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_events_2000000
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_append_only();

ALTER TABLE {schema}.outbox_events_2000000 ENABLE ALWAYS TRIGGER outbox_no_truncate;

CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {schema}.outbox_events_rest
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_append_only();

ALTER TABLE {schema}.outbox_events_rest ENABLE ALWAYS TRIGGER outbox_no_truncate;

-- For people: the rows that are not done with, and why.
CREATE VIEW {schema}.outbox_events_pending AS
WITH box AS (
    SELECT coalesce((
        SELECT k.outbox FROM {schema}.outbox_known k JOIN pg_catalog.pg_database d ON d.oid = k.database_oid
        WHERE k.table_oid = c.oid AND k.own_oid = '{schema}.outbox_known'::regclass
            AND d.datname = pg_catalog.current_database() LIMIT 1
    ), concat(n.nspname, '.', c.relname)) AS name
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = '{schema}.outbox_events'::regclass
), open AS MATERIALIZED (
    -- The entries are read once: row by row, PostgreSQL could lose one of them for the index of their ids.
    SELECT u.ids - coalesce((
        SELECT range_agg(r) FROM {schema}.outbox_journal j, unnest(j.ids) r
        WHERE j.outbox = (SELECT name FROM box) AND range_merge(j.ids) && u.ids
    ), '{}') AS ids
    FROM (
        SELECT coalesce((
            SELECT range_agg(r) FROM {schema}.outbox_known k, unnest(k.unsettled) r
            WHERE k.outbox = (SELECT name FROM box) AND k.table_oid = '{schema}.outbox_events'::regclass
            -- A progress of other partitions says nothing.
            HAVING bool_and(k.partitions = (
                SELECT pg_catalog.hashtextextended(
                    string_agg(p.relid::pg_catalog.oid::text, ' ' ORDER BY p.relid::pg_catalog.oid), 0
                ) FROM pg_catalog.pg_partition_tree('{schema}.outbox_events'::regclass) p
            ))
        ), '{[-9223372036854775808,)}') AS ids OFFSET 0
    ) u
)
SELECT e.*, coalesce(d.attempts, 0) AS attempts, d.last_error, d.available_at AS next_attempt_at
FROM {schema}.outbox_events e
LEFT JOIN {schema}.outbox_deferred d ON d.outbox = (SELECT name FROM box) AND d.id = e.id
WHERE d.id IS NOT NULL OR (SELECT ids FROM open) @> e.id;

---- create above / drop below ----

-- Locked before it is counted: a producer could insert between the count and the DROP.
LOCK TABLE {schema}.outbox_events IN ACCESS EXCLUSIVE MODE;

DO $$
DECLARE
    pending BIGINT;
BEGIN
    SELECT count(*) INTO pending FROM {schema}.outbox_events_pending;
    IF pending > 0 THEN
        RAISE EXCEPTION 'outbox_events holds % undelivered row(s)', pending USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'stop the producers and let `walpost run` deliver them, or delete on purpose what need not be delivered: DELETE FROM outbox_events WHERE id IN (SELECT id FROM outbox_events_pending)';
    END IF;
END
$$;

-- What the journal has of it says nothing of another table. outbox_known keeps its name: the next table is another outbox.
DELETE FROM {schema}.outbox_journal WHERE outbox IN (
    SELECT outbox FROM {schema}.outbox_known WHERE table_oid = '{schema}.outbox_events'::regclass
);

DELETE FROM {schema}.outbox_deferred WHERE outbox IN (
    SELECT outbox FROM {schema}.outbox_known WHERE table_oid = '{schema}.outbox_events'::regclass
);

UPDATE {schema}.outbox_known SET table_oid = 0, table_name = '' WHERE table_oid = '{schema}.outbox_events'::regclass;

DROP VIEW {schema}.outbox_events_pending;

DROP TABLE {schema}.outbox_events;
