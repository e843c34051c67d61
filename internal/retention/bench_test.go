package retention_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// bench is a database with the canonical tables, and an application's connection to it.
type bench struct {
	t     *testing.T
	url   string
	app   *pgx.Conn
	table *outbox.Table
	owner string // postgres.owner
}

func newBench(t *testing.T, pg *testenv.Postgres, mark outbox.Mark) *bench {
	t.Helper()
	b := &bench{t: t}
	b.table = &outbox.Table{Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical(), Mark: mark}
	b.url = pg.CopyDB(t, "canonical "+string(mark), b.migrate)
	b.app = b.connect()
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
	return table.Config{URL: b.url, Settings: stream.Settings, Slot: "walpost", Own: pg.Own{Owner: b.owner}}
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

// insert commits n pending rows.
func (b *bench) insert(n int) {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', i, 'order.created', jsonb_build_object('n', i) FROM generate_series(1, $1) i`, n)
}
