package deadletter_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// bench is a database with the canonical tables, the relay's connection to it
// and an application's.
type bench struct {
	t     *testing.T
	url   string
	db    *table.DB
	app   *pgx.Conn
	table *outbox.Table
}

func newBench(t *testing.T, pg *testenv.Postgres, mark outbox.Mark) *bench {
	t.Helper()
	b := &bench{t: t}
	b.table = &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: mark}
	b.url = pg.CopyDB(t, "canonical "+string(mark), b.migrate)
	b.app = b.connect()
	if table.Journals(b.table) {
		b.table.Layout = b.table.Layout.Journaled()
		b.exec(strings.Join(table.AppendOnlySQL(b.table, "public."+table.AppendOnly), ";"))
	}
	b.db = b.open()
	b.must(b.db.CheckTable(t.Context(), b.table))
	return b
}

// migrate makes walpost's tables in a database.
func (b *bench) migrate(url string) {
	b.t.Helper()
	cfg, err := pgx.ParseConfig(url)
	b.must(err)
	m := migrations.New(cfg, []*outbox.Table{b.table})
	_, err = m.Up(b.t.Context(), migrations.Latest)
	b.must(errors.Join(err, m.Close()))
}

func (b *bench) config() table.Config {
	return table.Config{URL: b.url, Settings: stream.Settings, Slot: "walpost"}
}

// open connects without the limits that a slow machine meets: a relay pings its connection.
func (b *bench) open() *table.DB {
	b.t.Helper()
	db, err := table.Open(b.t.Context(), b.config())
	b.must(err)
	b.t.Cleanup(db.Close)
	b.must(db.Limit(b.t.Context(), testenv.Patience))
	b.must(db.Use(b.t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET idle_session_timeout = 0; SET idle_in_transaction_session_timeout = 0`)
		return err
	}))
	return db
}

func (b *bench) connect() *pgx.Conn {
	b.t.Helper()
	c, err := pgx.Connect(b.t.Context(), b.url)
	b.must(err)
	b.t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) exec(sql string, args ...any) {
	b.t.Helper()
	_, err := b.app.Exec(b.t.Context(), sql, args...)
	b.must(err)
}

func (b *bench) text(sql string) (s string) {
	b.t.Helper()
	b.must(b.app.QueryRow(b.t.Context(), "SELECT ("+sql+")::text").Scan(&s))
	return s
}

func (b *bench) want(got []table.Verdict, want ...table.Verdict) {
	b.t.Helper()
	if !slices.Equal(got, want) {
		b.t.Fatalf("verdicts %v, want %v", got, want)
	}
}

// insert commits n rows and names them as the WAL would.
func (b *bench) insert(n int) (rows []table.Row) {
	b.t.Helper()
	result, err := b.app.Query(b.t.Context(), fmt.Sprintf(`INSERT INTO outbox_messages AS t (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', i, 'order.created', jsonb_build_object('n', i) FROM generate_series(1, $1) i
		RETURNING id::text, %s, pg_current_xact_id()::xid::text::bigint`, b.table.HashSQL("t")), n)
	b.must(err)
	var id string
	var hash, xid int64
	_, err = pgx.ForEachRow(result, []any{&id, &hash, &xid}, func() error {
		rows = append(rows, table.Row{Ref: outbox.Ref{Table: b.table, ID: id, Hash: uint64(hash)}, XID: uint32(xid)})
		return nil
	})
	b.must(err)
	return rows
}

var retry = table.Retry{Backoff: 30 * time.Second, MaxAttempts: 10}
