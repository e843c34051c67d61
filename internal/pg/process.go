package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Session is a server process and who is served.
type Session struct {
	PID         uint32 `json:"pid"`
	Application string `json:"application_name"`
	User        string `json:"user"`
	// Client is an address, or "local" for a Unix socket, and Since when it connected. Both are
	// nil where the role may not see them (pg_read_all_stats).
	Client *string    `json:"client_address"`
	Since  *time.Time `json:"connected_since"`
}

func (s *Session) String() string {
	from := s.Application
	if s.Client != nil {
		from += ", " + *s.Client
	}
	return fmt.Sprintf("process %d (%s)", s.PID, from)
}

// Hidden reports whether the role may not see all of it.
func (s *Session) Hidden() bool { return s.Since == nil }

// ReadSession looks a server process up; nil is none. A slot's walsender is one, too.
func (db *DB) ReadSession(ctx context.Context, pid uint32) (*Session, error) {
	s := &Session{PID: pid}
	err := db.QueryRow(ctx, []any{&s.Application, &s.User, &s.Client, &s.Since},
		`SELECT coalesce(application_name, ''), coalesce(usename::text, ''),
		CASE WHEN client_port = -1 THEN 'local' ELSE host(client_addr) END, backend_start
			FROM pg_stat_activity WHERE pid = $1`, int32(pid))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return s, nil
}

// SyncState is how the server counts the walsender of a process id: "async" is
// the only one that a relay can be. "" where it is not to be seen.
func (db *DB) SyncState(ctx context.Context, pid uint32) (state string, err error) {
	err = db.QueryRow(ctx, []any{&state},
		`SELECT coalesce(sync_state, '') FROM pg_stat_replication WHERE pid = $1`, pid)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read sync state: %w", err)
	}
	return state, nil
}

// SignOfLife is a text that changes while the walsender of a process id reads WAL or takes
// standby statuses, "" where it is not to be seen, and what the process waits for.
func (db *DB) SignOfLife(ctx context.Context, pid uint32) (life, waits string, err error) {
	err = db.QueryRow(ctx, []any{&life, &waits},
		`SELECT coalesce(r.sent_lsn::text || ' ' || r.reply_time::text, ''),
			coalesce(a.wait_event_type || ' ' || a.wait_event, 'nothing')
		FROM pg_stat_replication r JOIN pg_stat_activity a USING (pid) WHERE pid = $1`, pid)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("look at the walsender: %w", err)
	}
	return life, waits, nil
}

// DescribeSession is an expression that describes a session of pg_stat_activity by that alias.
func DescribeSession(alias string) string {
	return strings.ReplaceAll(`format('pid %s, application %L, user %L, database %L, `+
		`in its transaction since %s, last query: %s%s',
			{a}.pid, {a}.application_name, {a}.usename, {a}.datname,
			coalesce({a}.xact_start::text, 'unknown'), left({a}.query, 200),
			CASE WHEN {a}.query = '<insufficient privilege>'
				THEN format(' (GRANT pg_read_all_stats TO %I shows it)', current_user) END)`, "{a}", alias)
}

// BlockerOf describes who a server process waits for, or "" where it cannot be
// told. A prepared transaction belongs to nobody's session.
func (db *DB) BlockerOf(ctx context.Context, pid uint32) (who string, err error) {
	err = db.QueryRow(ctx, []any{&who}, `SELECT coalesce(
		(SELECT `+DescribeSession("a")+`
			FROM pg_stat_activity a WHERE a.pid = ANY (pg_blocking_pids($1)) ORDER BY a.xact_start LIMIT 1),
		(SELECT format('prepared transaction %L of user %L in database %L, since %s',
			p.gid, p.owner, p.database, p.prepared)
			FROM pg_locks l JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
			WHERE l.pid = $1 AND NOT l.granted LIMIT 1), '')`, int32(pid))
	if err != nil {
		return "", fmt.Errorf("look for who is waited for: %w", err)
	}
	return who, nil
}
