-- What is recorded: see record_test.go. A statement ends where a line does.
CREATE TYPE mood AS ENUM ('calm', 'cross');
CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant int, kind varchar(40), key uuid, version smallint, type text, body jsonb, at timestamptz, local timestamp, trace bytea, flag bool, score float8, day date, code char(5), ref oid, amount numeric, mood mood);
ALTER TABLE events ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE parts (id bigint, type text, body json, month int) PARTITION BY LIST (month);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_2 (month int, body json, type text, id bigint);
ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES IN (2);
CREATE TABLE other (id int PRIMARY KEY, v text);
CREATE TABLE other_full (id int, v text);
ALTER TABLE other_full REPLICA IDENTITY FULL;
CREATE TABLE other_untold (id int);
CREATE PUBLICATION recorded FOR TABLE events, parts, other, other_full WITH (publish_via_partition_root = true);
SELECT pg_create_logical_replication_slot('recorded', 'pgoutput');
-- One row with everything in it, one with nothing.
INSERT INTO events (tenant, kind, key, version, type, body, at, local, trace, flag, score, day, code, ref, amount, mood) VALUES (-7, 'order', '00112233-4455-6677-8899-aabbccddeeff', 3, 'order.created', '{"b": 1.50, "a": [null, "é"]}', '2026-11-20 10:17:35.043443+05:45', '2026-11-20 10:17:35.5', '\x00ff', true, 0.1, '2026-11-20', 'ab', 4294967295, 12.340, 'cross');
INSERT INTO events (tenant) VALUES (NULL);
-- Edges of types.
INSERT INTO events (kind, type, body, at, local, trace, flag, score, day, version, tenant) VALUES ('', '', '""', 'infinity', '-infinity', '', false, 'NaN', 'infinity', -32768, -2147483648), ('日本 🐘', E'\t\n\x01\\"''', '"\u0001"', '0044-03-15 12:00:00+00 BC', '294276-12-31 23:59:59.999999', '\x5c78', NULL, '-Infinity', '-infinity', 32767, 2147483647), (NULL, ' ', '{}', '0999-01-01', '12345-01-01 00:00:00.1', NULL, NULL, 1e23, '0001-01-01 BC', 0, 0), (NULL, NULL, '[]', '1999-12-31 23:59:59.999999+00', NULL, NULL, NULL, -5e-324, '5874897-12-31', NULL, NULL), (NULL, NULL, '1', NULL, NULL, NULL, NULL, 1e15, NULL, NULL, NULL), (NULL, NULL, 'null', NULL, NULL, NULL, NULL, '-0', NULL, NULL, NULL), (NULL, NULL, 'true', NULL, NULL, NULL, NULL, 9007199254740993, NULL, NULL, NULL);
-- TOAST.
INSERT INTO events (type, body) VALUES ('big', to_jsonb(repeat('x', 200000)));
-- Rolled back: a savepoint, a transaction.
BEGIN;
INSERT INTO events (type) VALUES ('kept');
SAVEPOINT s;
INSERT INTO events (type) VALUES ('never');
ROLLBACK TO s;
INSERT INTO other VALUES (1, 'between');
INSERT INTO events (type) VALUES ('kept too');
SAVEPOINT s;
INSERT INTO events (type) VALUES ('released');
RELEASE s;
COMMIT;
BEGIN;
INSERT INTO events (type) VALUES ('never');
ROLLBACK;
-- Tables that are not ours, and one that is not published.
BEGIN;
INSERT INTO other VALUES (2, NULL), (3, repeat('y', 100));
UPDATE other SET v = 'changed' WHERE id = 2;
UPDATE other SET id = 4 WHERE id = 3;
DELETE FROM other WHERE id = 2;
INSERT INTO other_full VALUES (1, 'a');
UPDATE other_full SET v = 'b';
DELETE FROM other_full;
INSERT INTO other_untold VALUES (1);
INSERT INTO events (type) VALUES ('after the others');
COMMIT;
INSERT INTO other_untold VALUES (2);
-- Our own rows change, later and in the same transaction.
UPDATE events SET flag = true WHERE type = 'big';
DELETE FROM events WHERE type = 'kept';
BEGIN;
INSERT INTO events (type) VALUES ('short-lived');
UPDATE events SET type = 'changed' WHERE type = 'short-lived';
DELETE FROM events WHERE type = 'changed';
COMMIT;
-- DDL in the middle of a transaction.
BEGIN;
INSERT INTO events (type) VALUES ('before');
ALTER TABLE events ADD COLUMN extra text DEFAULT 'extra';
INSERT INTO events (type) VALUES ('with a column more');
ALTER TABLE events DROP COLUMN amount;
INSERT INTO events (type) VALUES ('with a column less');
ALTER TABLE events RENAME COLUMN mood TO state;
INSERT INTO events (type, state) VALUES ('with another name', 'calm');
ALTER TABLE events ALTER COLUMN tenant TYPE bigint;
INSERT INTO events (type, tenant) VALUES ('with another type', 9223372036854775807);
COMMIT;
-- Renamed out of sight and back.
ALTER TABLE events RENAME TO old_events;
INSERT INTO old_events (type) VALUES ('not ours');
ALTER TABLE old_events RENAME TO events;
INSERT INTO events (type) VALUES ('ours again');
-- Partitions under their root, whose columns stand in another order.
BEGIN;
INSERT INTO parts VALUES (1, 'one', '{"a":  1}', 1), (2, 'two', NULL, 2), (3, 'one', '[]', 1);
CREATE TABLE parts_3 PARTITION OF parts FOR VALUES IN (3);
INSERT INTO parts VALUES (4, 'three', '{}', 3);
COMMIT;
-- Logical messages, in and out of transactions.
SELECT pg_logical_emit_message(true, 'walpost', 'alone');
BEGIN;
SELECT pg_logical_emit_message(false, 'walpost', 'at once');
INSERT INTO events (type) VALUES ('before the message');
SELECT pg_logical_emit_message(true, 'walpost', 'in the transaction');
INSERT INTO events (type) VALUES ('after the message');
COMMIT;
-- TRUNCATE, alone and after an INSERT that it undoes.
BEGIN;
INSERT INTO events (type) VALUES ('truncated');
TRUNCATE events, other RESTART IDENTITY CASCADE;
INSERT INTO events (type) VALUES ('first again');
COMMIT;
TRUNCATE parts;
-- COPY would look the same as this; a transaction that is spilled to disk.
INSERT INTO events (type, tenant) SELECT 'many', g FROM generate_series(1, 200) g;
-- Two-phase commit.
BEGIN;
INSERT INTO events (type) VALUES ('prepared');
PREPARE TRANSACTION 'recorded';
COMMIT PREPARED 'recorded';
-- An origin.
SELECT pg_replication_origin_create('recorded');
SELECT pg_replication_origin_session_setup('recorded');
INSERT INTO events (type) VALUES ('from an origin');
SELECT pg_replication_origin_session_reset();
-- A new table of our table's name.
DROP TABLE events;
CREATE TABLE events (body jsonb, type text, id bigint, tenant int, kind varchar(40), key uuid, version smallint, at timestamptz, local timestamp, trace bytea, flag bool, score float8, day date, code char(5), ref oid);
ALTER PUBLICATION recorded ADD TABLE events;
INSERT INTO events (id, type) VALUES (1, 'of the new table');
