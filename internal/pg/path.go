package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
)

// path is what names are looked for in. pg_temp is named, and last: where it is not, PostgreSQL looks there
// first for tables and types, and a trigger of an outbox may have made one there.
const path = "pg_catalog, pg_temp"

// ScriptHead begins a script for psql: what the database's owner has set may mean other functions, or read
// literals in another way.
const ScriptHead = "SET search_path = " + path + ";\nSET standard_conforming_strings = on;\n"

// readSQL names everything by its schema: it runs with the role's own search_path. It sets nothing where the
// server process is another one than the connection was told (%d), see [prove].
const readSQL = `SELECT pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %[1]d,
	pg_catalog.to_json(pg_catalog.current_schemas(false)),
	CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %[1]d
		THEN pg_catalog.set_config('walpost.search_path',
			pg_catalog.current_setting('search_path'), false) END,
	CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %[1]d
		THEN pg_catalog.set_config('search_path', '` + path + `', false) END,
	CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %[1]d
		THEN pg_catalog.set_config('standard_conforming_strings', 'on', false) END,
	` + metSQL + `,
	session_user OPERATOR(pg_catalog.<>) current_user AND (SELECT s.rolsuper FROM pg_catalog.pg_roles s
		WHERE s.rolname OPERATOR(pg_catalog.=) session_user)`

// metSQL says which server it is, see [OneServer]: microseconds since 1970, and the timeline in hexadecimal.
const metSQL = `pg_catalog.trunc(EXTRACT(epoch FROM pg_catalog.pg_postmaster_start_time())
		OPERATOR(pg_catalog.*) 1000000),
	CASE WHEN pg_catalog.pg_is_in_recovery() THEN '0' ELSE
		pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) END`

const setSQL = `SELECT
	pg_catalog.set_config('walpost.search_path', pg_catalog.current_setting('search_path'), false),
	pg_catalog.set_config('search_path', '` + path + `', false),
	pg_catalog.set_config('standard_conforming_strings', 'on', false)`

// schemasKey is where a connection keeps the schemas of the role's own search_path.
const schemasKey = "walpost.schemas"

// mostMessage is how many bytes a server's message may have: a row whose payload is as long as a NATS message
// can be, and what is beside it. No statement asks for more.
const mostMessage = 68 << 20

// Protect has every connection of the configuration resolve names in pg_catalog only, and end where the
// server announces a message that would take the program's memory. What the role's own search_path is stays
// in the session, as the setting walpost.search_path, for [OwnPath].
func Protect(cfg *pgconn.Config) {
	cfg.MaxProtocolMessageBodyLen = mostMessage
	bare, validate := cfg.Copy(), cfg.ValidateConnect
	cfg.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		if err := protect(ctx, bare, conn); err != nil {
			return fmt.Errorf("set search_path: %w", err)
		}
		if err := takeBytes(ctx, conn); err != nil {
			return fmt.Errorf("set client_encoding: %w", err)
		}
		if validate != nil { // target_session_attrs: it runs a query
			return validate(ctx, conn)
		}
		return nil
	}
}

func protect(ctx context.Context, bare *pgconn.Config, conn *pgconn.PgConn) error {
	if _, done := conn.CustomData()[schemasKey]; done {
		return nil
	}
	row, err := queryRow(ctx, conn, fmt.Sprintf(readSQL, int32(conn.PID())))
	if err != nil {
		return err
	}
	if row[0] != "t" {
		if err := prove(ctx, bare, conn); err != nil {
			return err
		}
		if _, err := queryRow(ctx, conn, setSQL); err != nil {
			return err
		}
	}
	var schemas []string
	if err := json.Unmarshal([]byte(row[1]), &schemas); err != nil {
		return fmt.Errorf("read schemas: %w", err)
	}
	if row[7] == "t" {
		const fix = "ALTER ROLE ... RESET role, ALTER DATABASE ... RESET role; or use the URL of that role"
		return hint.Coded("pg-role-set", hint.Errorf(fix,
			"a superuser's session begins as another role, by a setting role of the role, the database or "+
				"the URL: code of that role could give it up"))
	}
	microseconds, err := strconv.ParseInt(row[5], 10, 64)
	if err != nil {
		return fmt.Errorf("read the server's start: %w", err)
	}
	timeline, err := strconv.ParseUint(row[6], 16, 32)
	if err != nil {
		return fmt.Errorf("read the timeline: %w", err)
	}
	conn.CustomData()[metKey] = Met{Timeline: uint32(timeline), Started: time.UnixMicro(microseconds).UTC()}
	conn.CustomData()[schemasKey] = schemas
	return nil
}

// takeBytes has a server whose database has no encoding send text as it is. It would
// refuse each value that is no UTF-8, and with it every other row: to a client it has no
// other way to say so, and a walsender meets the same row for ever.
func takeBytes(ctx context.Context, conn *pgconn.PgConn) error {
	if !AnyBytes(conn) {
		return nil
	}
	_, err := queryRow(ctx, conn, `SELECT pg_catalog.set_config('client_encoding', 'SQL_ASCII', false)`)
	return err
}

// AnyBytes reports whether text from the server may be no UTF-8: its database has the
// encoding SQL_ASCII, which is none.
func AnyBytes(conn *pgconn.PgConn) bool {
	return conn.ParameterStatus("server_encoding") == "SQL_ASCII"
}

// Schemas are those of the role's own search_path that exist and that it may use.
func Schemas(conn *pgconn.PgConn) []string {
	schemas, _ := conn.CustomData()[schemasKey].([]string)
	return schemas
}

// OwnPath is a condition that is always true, for a statement that changes rows of a table. It gives the
// role's own search_path back to what the server runs for the statement and not of it: triggers, CHECK
// constraints, defaults and index expressions may call functions that rely on it. The statement's own names
// have been resolved by then, and the transaction's end takes the path away, after its deferred triggers.
//
// It has to stand in the WHERE of the outermost SELECT, which is then evaluated before any row is changed,
// and before any trigger runs. In a transaction of several statements [HidePath] follows the statement.
const OwnPath = `(SELECT set_config('search_path', current_setting('walpost.search_path'), true)) IS NOT NULL`

// HidePath is the statement that takes the role's own path away again, and ShowPath the one that gives it
// back for the deferred triggers of a COMMIT. They find their names on any path.
const (
	HidePath = `SET LOCAL search_path = ` + path
	ShowPath = `SELECT pg_catalog.set_config('search_path',
		pg_catalog.current_setting('walpost.search_path'), true)`
)

// queryRow runs a query of one row over the simple protocol: nothing is prepared.
func queryRow(ctx context.Context, conn *pgconn.PgConn, sql string) ([]string, error) {
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 {
		return nil, fmt.Errorf("%s results, want one row", strconv.Itoa(len(results)))
	}
	row := make([]string, len(results[0].Rows[0]))
	for i, v := range results[0].Rows[0] {
		row[i] = string(v)
	}
	return row, nil
}
