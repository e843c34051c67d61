-- +goose Up
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

-- +goose Down
SET LOCAL lock_timeout = '5s';

LOCK TABLE {schema}.outbox_replays IN ACCESS EXCLUSIVE MODE;

-- +goose StatementBegin
DO $$
DECLARE
    unfinished BIGINT;
BEGIN
    SELECT count(*) INTO unfinished FROM {schema}.outbox_replays WHERE state IN ('requested', 'running');
    IF unfinished > 0 THEN
        RAISE EXCEPTION 'outbox_replays holds % unfinished request(s)', unfinished USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'wait for them, or end them: walpost replay list, walpost replay cancel';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE {schema}.outbox_replays;
