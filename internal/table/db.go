package table

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Config says how to reach the database.
type Config struct {
	URL   string
	Files pg.Files // beside the URL
	// Settings are sent as run-time parameters; they fix how values render.
	Settings map[string]string
	// Dial opens TCP connections with keepalives set.
	Dial pgconn.DialFunc
	One  *pg.OneServer // of pg.Config
	// Slot names the advisory lock, and Serves what its holder delivers: see [Serving].
	Slot, Serves string
	// Own says where walpost's own tables are.
	Own pg.Own
}

// DB is the relay's connection to its database. It is safe for concurrent use:
// statements take turns.
type DB struct {
	*pg.DB
	own ownTables

	portion portionSize // of statements that hash rows
	// recordedParts divides [DB.Recorded], keyParts [DB.Aggregates].
	recordedParts, keyParts tableParts
	// awaited is the process that this relay waits for, see [DB.Deliver].
	awaited int32
	// marks holds the statement that marks, by outbox.Table: to write it costs as much as to mark some rows.
	marks sync.Map
}

// Open connects without taking the lock.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	conn, err := Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	db := &DB{}
	if db.own, err = findOwn(ctx, conn, cfg.Own); err == nil {
		db.DB, err = pg.NewDB(ctx, conn, cfg.Slot, statementLimit)
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	db.Serves = cfg.Serves
	return db, nil
}

// Serving describes what a relay of these outboxes delivers to a stream. Relays that differ in it must not
// share a slot: the one that stands by delivers nothing.
func Serving(tables []*outbox.Table, stream, domain string) string {
	all := []string{fmt.Sprintf("%q %q", stream, domain)}
	for _, t := range tables {
		all = append(all, fmt.Sprintf("%q %q %q %q", t.Schema, t.Name, t.Shard, t.Where))
	}
	slices.Sort(all[1:])
	return strings.Join(all, "\n")
}

// Connect opens a connection without the settings of [Open]. Its error carries advice.
func Connect(ctx context.Context, cfg Config) (*pgx.Conn, error) {
	conn, err := pg.Connect(ctx, cfg.connection())
	if err != nil {
		return nil, explainConnect(err)
	}
	return conn, nil
}

func (cfg Config) connection() pg.Config {
	return pg.Config{URL: cfg.URL, Files: cfg.Files, Settings: cfg.Settings, Dial: cfg.Dial, One: cfg.One}
}

func explainConnect(err error) error {
	if err == nil || hint.Of(err) != "" {
		return err
	}
	switch pg.Code(err) {
	case pgerrcode.InvalidPassword, pgerrcode.InvalidAuthorizationSpecification:
		return hint.Wrap(err, "check user and password of postgres.url, and pg_hba.conf")
	case pgerrcode.InvalidCatalogName:
		return hint.Wrap(err, "check the database name at the end of postgres.url")
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, "GRANT CONNECT ON DATABASE ... TO the role of postgres.url")
	case pgerrcode.TooManyConnections:
		return hint.Wrap(err, "raise max_connections: a relay takes up to six")
	case pgerrcode.ProtocolViolation:
		return hint.Wrap(err, pg.DirectHint)
	case "":
		if strings.Contains(err.Error(), "tls error: ") {
			return hint.Wrap(err, "enable TLS on the server and name its authority (sslrootcert=...), "+
				"or change sslmode in postgres.url")
		}
		return hint.Wrap(err,
			"check host and port of postgres.url, and that a PostgreSQL server answers there")
	}
	return err
}

// Away reports whether a connection to the server could not be made, or broke without an error message
// from the server.
func Away(err error) bool {
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// IsTemporary reports whether a statement failed for a reason that goes away by
// itself: a lock that another session holds (ALTER TABLE), a deadlock, a full
// disk.
func IsTemporary(err error) bool {
	switch pg.Code(err) {
	case pgerrcode.LockNotAvailable, pgerrcode.DeadlockDetected, pgerrcode.SerializationFailure,
		pgerrcode.QueryCanceled, pgerrcode.DiskFull, pgerrcode.OutOfMemory:
		return true
	}
	return false
}
