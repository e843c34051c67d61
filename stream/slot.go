package stream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// ErrSlotActive means that another walsender streams the slot: stand by.
var ErrSlotActive = errors.New("slot is active")

// ErrNoSlot means that the slot does not exist.
var ErrNoSlot = errors.New("slot does not exist")

// ErrSlotLost means that nothing can ever be read from the slot again: the
// server has invalidated it, or it was made by another plugin.
var ErrSlotLost = errors.New("slot is lost")

// NewSlotName is the name that a relay's slot has while it is being made.
func NewSlotName(slot string) string { return slot + "_new" }

// Slot is a row of pg_replication_slots.
type Slot struct {
	Name           string
	Plugin         string
	Database       string
	WALStatus      string // reserved, extended, unreserved or lost
	ConfirmedFlush outbox.LSN
}

// readSlot looks the slot up over the simple protocol, which is all that a
// replication connection speaks.
func readSlot(ctx context.Context, conn *pgconn.PgConn, name string) (*Slot, error) {
	rows, err := simpleQuery(ctx, conn, `SELECT coalesce(plugin, ''), coalesce(database, ''), coalesce(wal_status, ''),
		coalesce(confirmed_flush_lsn::text, '0/0'), temporary, current_database()
		FROM pg_replication_slots WHERE slot_name = `+quoteLiteral(name))
	if err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("slot %q: %w", name, ErrNoSlot)
	}
	r := rows[0]
	s := &Slot{Name: name, Plugin: r[0], Database: r[1], WALStatus: r[2]}
	if s.ConfirmedFlush, err = outbox.ParseLSN(r[3]); err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	return s, s.check(r[4] == "t", r[5])
}

func (s *Slot) check(temporary bool, database string) error {
	const other = "choose another postgres.slot, or drop this one if nobody needs it: SELECT pg_drop_replication_slot('%s')"
	switch {
	case s.Plugin == "":
		return hint.Coded("slot-foreign", hint.Errorf(fmt.Sprintf(other, s.Name), "slot %q is a physical one, want a logical one of pgoutput", s.Name))
	case s.Database != database:
		return hint.Coded("slot-foreign", hint.Errorf("choose another postgres.slot: a slot's name is unique in the whole server",
			"slot %q belongs to database %q, want %q", s.Name, s.Database, database))
	case temporary:
		return hint.Coded("slot-foreign", hint.Errorf("choose another postgres.slot", "slot %q is a temporary one of another session", s.Name))
	case s.Plugin != "pgoutput":
		return fmt.Errorf("slot %q: %w: its plugin is %q, want pgoutput", s.Name, ErrSlotLost, s.Plugin)
	case s.WALStatus == "lost":
		return fmt.Errorf("slot %q: %w: the server has invalidated it", s.Name, ErrSlotLost)
	}
	return nil
}

// Slots makes and drops slots, on a replication connection of its own. It is one
// goroutine's.
type Slots struct{ conn *pgconn.PgConn }

// OpenSlots connects. Close it.
func OpenSlots(ctx context.Context, url string) (*Slots, error) {
	// A creation that is given up must end in the server as well: the name would
	// be taken for as long as it waits there.
	conn, err := connect(ctx, url, func(c *pgconn.Config) {
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

// Read looks a slot up. It returns ErrNoSlot where there is none, ErrSlotLost
// where it is of no use any more, and another error where it is somebody else's.
func (s *Slots) Read(ctx context.Context, name string) (*Slot, error) {
	return readSlot(ctx, s.conn, name)
}

// Create makes a slot. It waits for every transaction that is running, prepared
// ones included. From 17 on, standbys synchronise it (FAILOVER).
func (s *Slots) Create(ctx context.Context, name string) error {
	action := "NOEXPORT_SNAPSHOT"
	if serverVersion(s.conn) >= 17 {
		action = "(FAILOVER, SNAPSHOT 'nothing')"
	}
	_, err := pglogrepl.CreateReplicationSlot(ctx, s.conn, outbox.QuoteIdent(name), "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{SnapshotAction: action, Mode: pglogrepl.LogicalReplication})
	return explainSlot(fmt.Sprintf("create slot %q", name), err)
}

// Drop drops a slot, where there is one. It returns ErrSlotActive where it is in
// use.
func (s *Slots) Drop(ctx context.Context, name string) error {
	_, err := simpleQuery(ctx, s.conn, fmt.Sprintf(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
		WHERE slot_name = %s AND database = current_database()`, quoteLiteral(name)))
	if code(err) == "42704" { // somebody else was faster
		return nil
	}
	return explainSlot(fmt.Sprintf("drop slot %q", name), err)
}

// Rename gives a slot another name: it is copied, where it stands, and dropped.
func (s *Slots) Rename(ctx context.Context, from, to string) error {
	_, err := simpleQuery(ctx, s.conn, fmt.Sprintf("SELECT pg_copy_logical_replication_slot(%s, %s, false)", quoteLiteral(from), quoteLiteral(to)))
	if err == nil && serverVersion(s.conn) >= 17 { // the copy has lost it
		_, err = simpleQuery(ctx, s.conn, fmt.Sprintf("ALTER_REPLICATION_SLOT %s (FAILOVER true)", outbox.QuoteIdent(to)))
	}
	if err != nil {
		return explainSlot(fmt.Sprintf("copy slot %q to %q", from, to), err)
	}
	return s.Drop(ctx, from)
}

func explainSlot(what string, err error) error {
	if err == nil {
		return nil
	}
	switch code(err) {
	case "55006":
		return fmt.Errorf("%s: %w: %w", what, ErrSlotActive, err)
	case "53400":
		return hint.Wrap(fmt.Errorf("%s: %w", what, err),
			"raise max_replication_slots (needs a restart) or drop a slot that nobody needs: there must be room for two while a relay makes its own")
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

func quoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
