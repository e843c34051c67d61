package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// outboxDB is a database with the canonical table.
func outboxDB(t *testing.T) (string, *pgx.Conn) {
	t.Helper()
	url := testenv.SharedPostgres(t).NewDB(t)
	cfg, err := pgx.ParseConfig(url)
	check(t, err)
	runner := migrations.New(cfg, []*outbox.Table{{Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical()}})
	defer runner.Close()
	_, err = runner.Up(t.Context(), migrations.Latest)
	check(t, err)
	return url, connect(t, url, pgx.QueryExecModeCacheStatement)
}

func connect(t *testing.T, url string, mode pgx.QueryExecMode) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	check(t, err)
	cfg.DefaultQueryExecMode = mode
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	check(t, err)
	t.Cleanup(func() { check(t, conn.Close(context.WithoutCancel(t.Context()))) })
	return conn
}

func openSQL(t *testing.T, url string) *sql.DB {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	check(t, err)
	db := stdlib.OpenDB(*cfg)
	t.Cleanup(func() { check(t, db.Close()) })
	return db
}

var full = outbox.Message{
	TenantID: 17, AggregateType: "order", AggregateID: -4711, EventType: "order.created", EventVersion: 3,
	Payload:     json.RawMessage(`{"note": "it's \"é\" 🐘", "n": 12345678901234567890.10}`),
	OccurredAt:  time.Date(2026, 11, 20, 10, 17, 35, 43443000, time.FixedZone("", 5*3600+45*60)),
	AvailableAt: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC),
	TraceID:     "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}

const fullText = `17|order|-4711|order.created|3|{"n": 12345678901234567890.10, "note": "it's \"é\" 🐘"}` +
	`|2026-11-20 04:32:35.043443+00|2027-01-01 00:00:00+00|00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`

// rowText is what the table holds under an id, without the relay's columns,
// which must be untouched.
func rowText(t *testing.T, conn *pgx.Conn, id int64) (s string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), "SET timezone = 'UTC'")
	check(t, err)
	err = conn.QueryRow(t.Context(), `SELECT concat_ws('|', tenant_id, aggregate_type, aggregate_id, event_type, event_version,
			payload, occurred_at, available_at, coalesce(trace_id, 'NULL'))
		FROM outbox_messages WHERE id = $1 AND processed_at IS NULL AND attempts = 0 AND last_error IS NULL`, id).Scan(&s)
	check(t, err)
	return s
}

// Every kind of transaction of both drivers writes the same row.
func TestInsertDrivers(t *testing.T) {
	url, conn := outboxDB(t)
	db := openSQL(t, url)
	for name, insert := range map[string]func(t *testing.T) (int64, error){
		"pgx.Tx":          inPgxTx(conn),
		"pgxpool.Tx":      inPoolTx(url),
		"pgx.Conn":        func(t *testing.T) (int64, error) { return outbox.Insert(t.Context(), conn, full) },
		"pgx describe":    inPgxTx(connect(t, url, pgx.QueryExecModeDescribeExec)),
		"pgx cache":       inPgxTx(connect(t, url, pgx.QueryExecModeCacheDescribe)),
		"pgx exec":        inPgxTx(connect(t, url, pgx.QueryExecModeExec)),
		"pgx simple":      inPgxTx(connect(t, url, pgx.QueryExecModeSimpleProtocol)),
		"sql.DB":          func(t *testing.T) (int64, error) { return outbox.Insert(t.Context(), db, full) },
		"sql.Tx":          inSQLTx(db),
		"sql.Conn":        onSQLConn(db),
		"wrapped pgx.Tx":  func(t *testing.T) (int64, error) { return outbox.Insert(t.Context(), wrapped{conn}, full) },
		"wrapped sql.DB":  func(t *testing.T) (int64, error) { return outbox.Insert(t.Context(), wrappedSQL{db}, full) },
		"pointer to that": func(t *testing.T) (int64, error) { return outbox.Insert(t.Context(), &wrapped{conn}, full) },
	} {
		t.Run(name, func(t *testing.T) {
			id, err := insert(t)
			check(t, err)
			if got := rowText(t, conn, id); got != fullText {
				t.Errorf("row\n got %s\nwant %s", got, fullText)
			}
		})
	}
}

// wrapped is an application's own type around pgx.
type wrapped struct{ *pgx.Conn }

type wrappedSQL struct{ *sql.DB }

func inPgxTx(conn *pgx.Conn) func(t *testing.T) (int64, error) {
	return func(t *testing.T) (int64, error) {
		tx, err := conn.Begin(t.Context())
		check(t, err)
		id, err := outbox.Insert(t.Context(), tx, full)
		return id, errors.Join(err, tx.Commit(t.Context()))
	}
}

func inPoolTx(url string) func(t *testing.T) (int64, error) {
	return func(t *testing.T) (int64, error) {
		pool, err := pgxpool.New(t.Context(), url)
		check(t, err)
		defer pool.Close()
		tx, err := pool.Begin(t.Context())
		check(t, err)
		id, err := outbox.Insert(t.Context(), tx, full)
		return id, errors.Join(err, tx.Commit(t.Context()))
	}
}

func inSQLTx(db *sql.DB) func(t *testing.T) (int64, error) {
	return func(t *testing.T) (int64, error) {
		tx, err := db.BeginTx(t.Context(), nil)
		check(t, err)
		id, err := outbox.Insert(t.Context(), tx, full)
		return id, errors.Join(err, tx.Commit())
	}
}

func onSQLConn(db *sql.DB) func(t *testing.T) (int64, error) {
	return func(t *testing.T) (int64, error) {
		conn, err := db.Conn(t.Context())
		check(t, err)
		defer conn.Close()
		return outbox.Insert(t.Context(), conn, full)
	}
}

func TestInsertDefaults(t *testing.T) {
	_, conn := outboxDB(t)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	defer tx.Rollback(t.Context())
	id, err := outbox.Insert(t.Context(), tx, outbox.Message{AggregateType: "a", EventType: "b", Payload: json.RawMessage(`null`)})
	check(t, err)
	var ok bool
	check(t, tx.QueryRow(t.Context(), `SELECT occurred_at = now() AND available_at = now() AND event_version = 1
		AND trace_id IS NULL AND tenant_id = 0 AND aggregate_id = 0 AND payload = 'null' FROM outbox_messages WHERE id = $1`, id).Scan(&ok))
	if !ok {
		t.Error("the row does not have the defaults")
	}
}

// The event shares the transaction's fate.
func TestInsertRollsBack(t *testing.T) {
	url, conn := outboxDB(t)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	_, err = outbox.Insert(t.Context(), tx, full)
	check(t, err)
	check(t, tx.Rollback(t.Context()))
	sqlTx, err := openSQL(t, url).BeginTx(t.Context(), nil)
	check(t, err)
	_, err = outbox.Insert(t.Context(), sqlTx, full)
	check(t, err)
	check(t, sqlTx.Rollback())
	var n int
	check(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox_messages").Scan(&n))
	if n != 0 {
		t.Errorf("%d events were left behind", n)
	}
}

// The table is found whatever the search_path, and its name is quoted.
func TestInsertTable(t *testing.T) {
	_, conn := outboxDB(t)
	_, err := conn.Exec(t.Context(), `CREATE SCHEMA "My App"; CREATE TABLE "My App"."Out""box" (LIKE outbox_messages INCLUDING ALL); SET search_path = "My App"`)
	check(t, err)
	m := full
	_, err = outbox.Insert(t.Context(), conn, m)
	check(t, err)
	m.Table = `My App.Out"box`
	_, err = outbox.Insert(t.Context(), conn, m)
	check(t, err)
	var there, here int
	check(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM public.outbox_messages), (SELECT count(*) FROM "Out""box")`).Scan(&there, &here))
	if there != 1 || here != 1 {
		t.Errorf("%d and %d rows, want one each", there, here)
	}
}

// What is wrong with the message is found before the transaction is touched.
func TestInsertRefuses(t *testing.T) {
	_, conn := outboxDB(t)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	defer tx.Rollback(t.Context())
	for want, change := range map[string]func(*outbox.Message){
		"no EventType":               func(m *outbox.Message) { m.EventType = "" },
		"negative EventVersion -1":   func(m *outbox.Message) { m.EventVersion = -1 },
		"no Payload":                 func(m *outbox.Message) { m.Payload = nil },
		"invalid Payload: not JSON":  func(m *outbox.Message) { m.Payload = json.RawMessage(`{"a": 1}}`) },
		"invalid Payload: not UTF-8": func(m *outbox.Message) { m.Payload = json.RawMessage("\"\xff\"") },
		`table name "a.b.c"`:         func(m *outbox.Message) { m.Table = "a.b.c" },
	} {
		m := full
		change(&m)
		if _, err := outbox.Insert(t.Context(), tx, m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	_, err = outbox.Insert(t.Context(), tx, full) // the transaction is sound
	check(t, err)
}

type notARow struct{}

func (notARow) QueryRow(context.Context, string, ...any) int { return 0 }

type otherOrder struct{}

func (otherOrder) QueryRow(string, context.Context, ...any) *sql.Row { return nil }

type noRow struct{}

func (noRow) QueryRow(context.Context, string, ...any) pgx.Row { return nil }

func TestInsertInto(t *testing.T) {
	for want, tx := range map[string]any{
		"nil":                        nil,
		"int is neither":             1,
		"outbox_test.notARow is nei": notARow{},
		"outbox_test.otherOrder is ": otherOrder{},
		"noRow returned no row":      noRow{},
	} {
		if _, err := outbox.Insert(t.Context(), tx, full); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%T: error %v, want %q", tx, err, want)
		}
	}
}

// The server's error comes through, for the caller to look into.
func TestInsertServerError(t *testing.T) {
	_, conn := outboxDB(t)
	m := full
	m.Payload = json.RawMessage(`"\u0000"`)
	_, err := outbox.Insert(t.Context(), conn, m)
	if err == nil || !strings.Contains(err.Error(), "22P05") {
		t.Errorf("error %v, want the server's", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := outbox.Insert(ctx, conn, full); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want a canceled context", err)
	}
}
