package relay_test

import (
	"context"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walpost/walpost/internal/testenv"
)

// TestWalsenderHangs: everything else works, and nothing is delivered.
func TestWalsenderHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	pid := r.pid(`SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	r.must(syscall.Kill(pid, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	r.put(11, 20)
	x.alarmed("walsender_silent")
	eventually(t, "the relay is not ready", func() bool { return x.Ready() != nil })
	r.must(syscall.Kill(pid, syscall.SIGCONT))
	x.streaming()
	r.pending(0)
	r.storedIs(1, 20)
	x.quietBut()
}

// TestSlotIsSomebodyElses: this relay has the lock, and something that is no relay reads the
// slot.
func TestSlotIsSomebodyElses(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming().halt()
	cfg, err := pgconn.ParseConfig(r.url)
	r.must(err)
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	r.must(err)
	defer conn.Close(context.Background())
	conn.Frontend().Send(&pgproto3.Query{String: `START_REPLICATION SLOT "` + r.cfg.Slot + `" LOGICAL 0/0 (proto_version '1', publication_names 'walpost')`})
	r.must(conn.Frontend().Flush())
	eventually(t, "the slot is taken", func() bool {
		return r.query1(`SELECT active FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot) == "true"
	})
	x := r.start()
	r.put(1, 10)
	eventually(t, "the relay stands by", func() bool { return x.Status().State == "standby" })
	x.alarmed("slot_in_use")
	eventually(t, "the relay is not ready", func() bool { return x.Ready() != nil })
	r.must(conn.Conn().Close())
	x.streaming()
	r.pending(0)
	r.storedIs(1, 10)
}
