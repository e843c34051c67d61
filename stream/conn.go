package stream

import (
	"context"
	"fmt"
	"maps"
	"net"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
)

// Settings fix the text that values are rendered in. Every connection of the
// relay has them, so that a row reads the same in the WAL and in a SELECT.
var Settings = map[string]string{
	"application_name":   "walpost",
	"client_encoding":    "UTF8",
	"datestyle":          "ISO",
	"timezone":           "UTC",
	"intervalstyle":      "postgres",
	"extra_float_digits": "3",
	"bytea_output":       "hex",
}

// walSenderTimeout is how long the server keeps a walsender whose relay has
// gone silent: the time until a standby gets the slot of a relay that was
// stopped or cut off. The standby status goes out ten times as often.
const walSenderTimeout = 10 * time.Second

// answerTimeout bounds a question to the server, and ends the connection with it. Only
// the creation of a slot takes as long as others' transactions do.
const answerTimeout = 30 * time.Second

// Dialer notices a dead peer in about ten seconds instead of hours.
func Dialer() *net.Dialer {
	return &net.Dialer{
		Timeout: 5 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3,
		},
	}
}

// connect opens a replication connection to the database.
func connect(ctx context.Context, server pg.Config, options ...func(*pgconn.Config)) (*pgconn.PgConn, error) {
	settings := maps.Clone(Settings)
	settings["replication"] = "database"
	settings["client_min_messages"] = "notice" // 18 says in a warning that it leaves rows out
	settings["wal_sender_timeout"] = fmt.Sprint(walSenderTimeout.Milliseconds())
	server.Settings, server.Dial = settings, Dialer().DialContext
	conn, err := pg.ConnectRaw(ctx, server, options...)
	if err != nil {
		return nil, explainConnect(fmt.Errorf("open replication connection: %w", err))
	}
	return conn, nil
}

const directHint = "this looks like a connection pooler: " +
	"give postgres.url the host and port of PostgreSQL itself"

func explainConnect(err error) error {
	switch pg.Code(err) {
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(fmt.Errorf("%w: %w", ErrCannotStream, err),
			"give the role the right to stream: ALTER ROLE ... REPLICATION "+
				"(RDS: GRANT rds_replication TO ...)")
	case pgerrcode.InvalidAuthorizationSpecification:
		return hint.Wrap(fmt.Errorf("%w: %w", ErrCannotStream, err),
			"pg_hba.conf must allow the role into this database for replication: "+
				"for logical replication the line names "+
				"the database itself, the keyword \"replication\" does not match")
	case pgerrcode.TooManyConnections:
		return hint.Wrap(err, "raise max_wal_senders or max_connections")
	case pgerrcode.ProtocolViolation:
		return hint.Wrap(err, directHint)
	}
	return err
}
