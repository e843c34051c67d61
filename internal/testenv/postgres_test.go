package testenv

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestPostgresKeepsPortAndDataOverCrashAndRestart(t *testing.T) {
	Clusters(t, func(t *testing.T, pg *Postgres) {
		ctx := t.Context()
		if got := query[string](t, pg, "SHOW wal_level"); got != "logical" {
			t.Fatalf("wal_level is %s", got)
		}
		if got := query[string](t, pg, "SHOW server_version_num"); got[:2] != strconv.Itoa(pg.Version()) {
			t.Fatalf("version is %s, not %d", got, pg.Version())
		}
		check(t, pg.Exec(ctx, "postgres", "CREATE TABLE t (n int); INSERT INTO t VALUES (1)"))
		port := pg.Port()

		check(t, pg.Stop(ctx, Immediate))
		if pg.Pid() != 0 {
			t.Fatal("still runs after a crash")
		}
		check(t, pg.Start(ctx))
		check(t, pg.Exec(ctx, "postgres", "INSERT INTO t VALUES (2)"))
		check(t, pg.Restart(ctx))

		if got := query[int64](t, pg, "SELECT sum(n) FROM t"); got != 3 {
			t.Fatalf("sum is %d, not 3", got)
		}
		if pg.Port() != port {
			t.Fatalf("port changed from %d to %d", port, pg.Port())
		}
	})
}

func TestClustersHaveIdentitiesOfTheirOwn(t *testing.T) {
	const identity = "SELECT system_identifier FROM pg_control_system()"
	a, b := NewPostgres(t, PGOptions{}), NewPostgres(t, PGOptions{})
	if query[int64](t, a, identity) == query[int64](t, b, identity) {
		t.Fatal("two clusters have one system identifier")
	}
}

func TestSmartStopCanBeObserved(t *testing.T) {
	pg := NewPostgres(t, PGOptions{})
	conn := connect(t, pg, "postgres")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := pg.Stop(ctx, Smart); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a smart stop with a client: %v", err)
	}
	check(t, conn.Close(t.Context()))
	check(t, pg.Stop(t.Context(), Smart))
}

func TestReloadIsSeenByNewSessions(t *testing.T) {
	pg := NewPostgres(t, PGOptions{Settings: map[string]string{"work_mem": "1MB"}})
	check(t, pg.Reload(t.Context(), map[string]string{"work_mem": "7MB", "search_path": `"it's", public`}))
	if got := query[string](t, pg, "SHOW work_mem"); got != "7MB" {
		t.Fatalf("work_mem is %s", got)
	}
	if got := query[string](t, pg, "SHOW search_path"); got != `"it's", public` {
		t.Fatalf("search_path is %s", got)
	}
}

func TestDatabasesOfTheSharedCluster(t *testing.T) {
	pg := SharedPostgres(t)
	if pg != SharedPostgres(t) {
		t.Fatal("two shared clusters")
	}
	if a, b := pg.NewDB(t), pg.NewDB(t); a == b {
		t.Fatalf("one database twice: %s", a)
	}
}

func TestStandbyFollowsAndIsPromoted(t *testing.T) {
	Clusters(t, func(t *testing.T, pg *Postgres) {
		ctx := t.Context()
		check(t, pg.Exec(ctx, "postgres", "CREATE TABLE t (n int); INSERT INTO t VALUES (1)"))
		standby := pg.NewStandby(t, "standby_a", nil)
		check(t, pg.Exec(ctx, "postgres", "INSERT INTO t VALUES (2)"))
		waitFor(t, "the standby to follow", func() bool {
			return query[int64](t, standby, "SELECT coalesce(sum(n), 0) FROM t") == 3
		})
		if got := query[string](t, pg, "SELECT slot_name::text FROM pg_replication_slots WHERE active"); got != "standby_a" {
			t.Fatalf("the active slot is %s", got)
		}
		check(t, pg.Stop(ctx, Immediate))
		check(t, standby.Promote(ctx))
		check(t, standby.Exec(ctx, "postgres", "INSERT INTO t VALUES (3)"))
		check(t, standby.Restart(ctx))
		if got := query[int64](t, standby, "SELECT sum(n) FROM t"); got != 6 {
			t.Fatalf("sum is %d, not 6", got)
		}
	})
}

func TestCloseLeavesNothing(t *testing.T) {
	pg, err := StartPostgres(t.Context(), PGOptions{FSync: true})
	check(t, err)
	check(t, pg.Close())
	if _, err := os.Stat(filepath.Dir(pg.Dir())); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the directory is still there: %v", err)
	}
}

func TestStartReportsTheLog(t *testing.T) {
	_, err := StartPostgres(t.Context(), PGOptions{Settings: map[string]string{"wal_level": "nonsense"}})
	if err == nil || !strings.Contains(err.Error(), `invalid value for parameter "wal_level"`) {
		t.Fatalf("started with a wrong wal_level: %v", err)
	}
}

func connect(t *testing.T, pg *Postgres, db string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pg.URL(db))
	check(t, err)
	return conn
}

func query[T any](t *testing.T, pg *Postgres, sql string) (v T) {
	t.Helper()
	check(t, pg.withConn(t.Context(), "postgres", func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), sql).Scan(&v)
	}))
	return v
}
