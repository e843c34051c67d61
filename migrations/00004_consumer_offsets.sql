-- +goose Up
-- How far each consumer has come in each stream. A consumer advances its row in the transaction of its own work, which is
-- what makes the work happen once.
CREATE TABLE {schema}.consumer_offsets (
    consumer      TEXT        NOT NULL,
    stream        TEXT        NOT NULL,
    -- The stream sequence of the last message that was handled; 0 before the first.
    last_sequence BIGINT      NOT NULL DEFAULT 0,
    -- That message's own id and position. They still say where the consumer is when the stream was restored or made anew
    -- and its sequences began again.
    message_id    TEXT,
    position      TEXT,
    updated_at    TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, stream)
) WITH (
    -- A few rows, each updated for every message, no indexed column among the changes: with room in the page the updates
    -- are HOT and clean up after themselves.
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = false
);

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.consumer_offsets IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.consumer_offsets) THEN
        RAISE EXCEPTION 'consumer_offsets holds the positions of consumers: without them each handles its stream again' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'when no consumer needs its position any more: TRUNCATE consumer_offsets';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.consumer_offsets;
