-- What the relay's role, or an application's, needs on the tables, and no more. Run it as their owner, after `walpost migrate up`:
--
--   psql --set ON_ERROR_STOP=1 --set relay=walpost --file=grants.sql "$OWNER_URL"
--
-- relay   the role (walpost); it needs LOGIN REPLICATION besides, from a superuser
-- mark    outboxes[].mark: journal, update or delete (journal)
-- outbox  the table (outbox_events with mark journal, otherwise outbox_messages)
-- producer  a role that writes events, if it is to have its grant here, too
-- schema  where the tables are (public)
--
-- In a database that has only the tables of a consumer, or of idempotency keys (walpost migrate up --only), name the
-- application's role instead. The relay then gets nothing, unless it is named, too:
--
--   psql --set ON_ERROR_STOP=1 --set consumer=mailer --file=grants.sql "$OWNER_URL"
--
-- consumer     the role of a consumer
-- idempotency  the role of an application that answers repeated requests

\if :{?schema}
\else
\set schema public
\endif
-- Not the path that the database's owner may have set: it may mean other functions.
SET search_path = pg_catalog, :"schema", pg_temp;
SET standard_conforming_strings = on;

-- Others who may create objects in a schema of the relay's search_path could have triggers of the outbox call theirs. A new
-- cluster of PostgreSQL 15 or newer has it so; it takes the schema's owner, and is only a warning for others.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;

\if :{?consumer}
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_offsets TO :"consumer";
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_definitions TO :"consumer";
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_seen TO :"consumer";
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_parked TO :"consumer";
\endif
\if :{?idempotency}
GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO :"idempotency";
\endif
\if :{?consumer}
\elif :{?idempotency}
\elif :{?relay}
\else
\set relay walpost
\endif

\if :{?relay}
\if :{?mark}
\else
\set mark journal
\endif
\if :{?outbox}
\else
SELECT CASE :'mark' WHEN 'journal' THEN 'outbox_events' ELSE 'outbox_messages' END AS outbox \gset
\endif

SELECT :'mark' = 'update' AS mark_update, :'mark' = 'delete' AS mark_delete, :'mark' = 'journal' AS mark_journal \gset
-- DELETE is for a row that becomes a dead letter, too: it moves in one statement.
\if :mark_update
GRANT SELECT, UPDATE (processed_at, attempts, last_error, available_at), DELETE ON :outbox TO :"relay";
\elif :mark_delete
GRANT SELECT, UPDATE (attempts, last_error, available_at), DELETE ON :outbox TO :"relay";
\elif :mark_journal
GRANT SELECT ON :outbox TO :"relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_journal TO :"relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_deferred TO :"relay";
SELECT pg_get_serial_sequence(:'outbox', 'id') AS ids \gset
-- The relay notices ids that come again.
GRANT SELECT ON SEQUENCE :ids TO :"relay";
\else
DO $$ BEGIN RAISE EXCEPTION 'mark is update, delete or journal'; END $$;
\endif

-- Rows that cannot be delivered go there, whatever the mark is. The relay also counts them.
GRANT SELECT, INSERT ON outbox_messages_dlq TO :"relay";
-- For walpost verify.
GRANT SELECT ON outbox_messages_archive TO :"relay";
-- For walpost replay: the command writes a request, the relay fulfils it.
GRANT SELECT, INSERT, UPDATE ON outbox_replays TO :"relay";
-- What the relay remembers of its first start.
GRANT SELECT, INSERT, UPDATE ON outbox_known TO :"relay";
GRANT SELECT, INSERT, UPDATE ON outbox_sent TO :"relay";
\if :{?producer}
-- Column by column: a row that is inserted as processed is not delivered. The id is for RETURNING, as outbox.Insert has it.
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id),
	SELECT (id) ON :outbox TO :"producer";
SELECT count(*) = 2 AS has_headers FROM pg_attribute
WHERE attrelid = :'outbox'::regclass AND attname IN ('aggregate_version', 'headers') \gset
\if :has_headers
GRANT INSERT (aggregate_version, headers) ON :outbox TO :"producer";
\endif
\else
\endif
\endif
