package stream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ErrSlotActive means that another walsender streams the slot: stand by.
var ErrSlotActive = errors.New("slot is active")

// ErrNoSlot means that the slot does not exist.
var ErrNoSlot = errors.New("slot does not exist")

// ErrSlotLost means that nothing can ever be read from the slot again: the
// server has invalidated it.
var ErrSlotLost = errors.New("slot is lost")

// ErrForeignSlot means that a slot of that name belongs to another program. It is never dropped.
var ErrForeignSlot = errors.New("slot belongs to another program")

// NewSlotName is the name of the temporary slot that a relay's slot is copied from.
func NewSlotName(slot string) string { return slot + "_new" }

// Slot is a row of pg_replication_slots.
type Slot struct {
	Name           string
	Plugin         string
	Database       string
	WALStatus      string // reserved, extended, unreserved or lost
	ConfirmedFlush outbox.LSN
	temporary      bool
	twoPhase       bool
}

// readSlot looks the slot up over the simple protocol, which is all that a
// replication connection speaks.
func readSlot(ctx context.Context, conn *pgconn.PgConn, name string) (*Slot, error) {
	rows, err := simpleQuery(ctx, conn, `SELECT
		coalesce(plugin, ''), coalesce(database, ''), coalesce(wal_status, ''),
		coalesce(confirmed_flush_lsn::text, '0/0'), temporary, two_phase, current_database()
		FROM pg_replication_slots WHERE slot_name = `+pg.QuoteLiteral(name))
	if err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("slot %q: %w", name, ErrNoSlot)
	}
	r := rows[0]
	s := &Slot{
		Name: name, Plugin: r[0], Database: r[1], WALStatus: r[2],
		temporary: r[4] == "t", twoPhase: r[5] == "t",
	}
	if s.ConfirmedFlush, err = outbox.ParseLSN(r[3]); err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	return s, s.check(r[6])
}

// check tells a slot that a relay can have made from all others, as [pg.OwnSlot] does in SQL.
func (s *Slot) check(database string) error {
	foreign := func(what string) error {
		return hint.Coded("slot-foreign", hint.Errorf(dropHint(s.Name),
			"slot %q: %w: it is %s, want a logical one of pgoutput in database %q",
			s.Name, ErrForeignSlot, what, database))
	}
	switch {
	case s.Plugin == "":
		return foreign("physical")
	case s.Database != database:
		return foreign(fmt.Sprintf("of database %q", s.Database))
	case s.temporary:
		return foreign("temporary")
	case s.Plugin != "pgoutput":
		return foreign(fmt.Sprintf("of plugin %q", s.Plugin))
	case s.twoPhase:
		return foreign("one with two_phase")
	case s.WALStatus == "lost":
		return fmt.Errorf("slot %q: %w: the server has invalidated it", s.Name, ErrSlotLost)
	}
	return nil
}

func dropHint(slot string) string {
	return "choose another postgres.slot: a slot's name is unique in the whole server; " +
		"or, if nobody needs it: SELECT pg_drop_replication_slot(" + pg.QuoteLiteral(slot) + ")"
}

// Slots makes slots, on its own replication connection. It is one
// goroutine's.
type Slots struct{ conn *pgconn.PgConn }

// OpenSlots connects to a server of which URL and Files are given. Close it.
func OpenSlots(ctx context.Context, server pg.Config) (*Slots, error) {
	// A creation that is given up must end in the server as well: the name would
	// be taken for as long as it waits there.
	conn, err := connect(ctx, server, func(c *pgconn.Config) {
		c.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 2 * time.Second}
		}
	})
	if err != nil {
		return nil, err
	}
	return &Slots{conn}, nil
}

// Close ends the connection.
func (s *Slots) Close() { closeConn(s.conn) }

// PID is the server process's id.
func (s *Slots) PID() uint32 { return s.conn.PID() }

// System identifies the server.
func (s *Slots) System(ctx context.Context) (System, error) { return identify(ctx, s.conn) }

// Read looks a slot up. It returns ErrNoSlot where it does not exist, ErrSlotLost
// where it is of no use any more, and ErrForeignSlot where it is somebody else's.
func (s *Slots) Read(ctx context.Context, name string) (*Slot, error) {
	return readSlot(ctx, s.conn, name)
}

// Create makes a slot. It waits for every transaction that is running, prepared
// ones included. From 17 on, standbys synchronise it (FAILOVER).
func (s *Slots) Create(ctx context.Context, name string) error {
	return s.create(ctx, name, false)
}

// CreateTemporary makes a slot that ends with the connection, for Copy. It waits as Create does.
func (s *Slots) CreateTemporary(ctx context.Context, name string) error {
	return s.create(ctx, name, true)
}

func (s *Slots) create(ctx context.Context, name string, temporary bool) error {
	action := "NOEXPORT_SNAPSHOT"
	if serverVersion(s.conn) >= 17 && !temporary {
		action = "(FAILOVER, SNAPSHOT 'nothing')"
	}
	_, err := pglogrepl.CreateReplicationSlot(ctx, s.conn, outbox.QuoteIdent(name), "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{
			Temporary: temporary, SnapshotAction: action, Mode: pglogrepl.LogicalReplication,
		})
	return explainSlot(fmt.Sprintf("create slot %q", name), err)
}

// Copy makes a lasting slot that stands where a temporary one of this connection does.
func (s *Slots) Copy(ctx context.Context, from, to string) error {
	_, err := simpleQuery(ctx, s.conn, fmt.Sprintf("SELECT pg_copy_logical_replication_slot(%s, %s, false)",
		pg.QuoteLiteral(from), pg.QuoteLiteral(to)))
	if err == nil && serverVersion(s.conn) >= 17 { // the copy has lost it
		_, err = simpleQuery(ctx, s.conn, fmt.Sprintf("ALTER_REPLICATION_SLOT %s (FAILOVER true)",
			outbox.QuoteIdent(to)))
	}
	return explainSlot(fmt.Sprintf("copy slot %q to %q", from, to), err)
}

func explainSlot(what string, err error) error {
	if err == nil {
		return nil
	}
	switch pg.Code(err) {
	case pgerrcode.ObjectInUse:
		return fmt.Errorf("%s: %w: %w", what, ErrSlotActive, err)
	case pgerrcode.DuplicateObject:
		return hint.Wrap(fmt.Errorf("%s: %w", what, err),
			"SELECT * FROM pg_replication_slots shows whose it is; drop it if nobody needs it")
	case pgerrcode.ConfigurationLimitExceeded:
		return hint.Wrap(fmt.Errorf("%s: %w", what, err),
			"raise max_replication_slots (needs a restart) or drop a slot that nobody needs: "+
				"there must be room for two while a relay makes its own")
	}
	return fmt.Errorf("%s: %w", what, err)
}

func serverVersion(conn *pgconn.PgConn) int {
	v := 0
	for _, c := range conn.ParameterStatus("server_version") {
		if c < '0' || c > '9' {
			break
		}
		v = v*10 + int(c-'0')
	}
	return v
}

func simpleQuery(ctx context.Context, conn *pgconn.PgConn, sql string) ([][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	var rows [][]string
	for _, r := range results {
		for _, values := range r.Rows {
			row := make([]string, len(values))
			for i, v := range values {
				row[i] = string(v)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}
