package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/drill"
	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// TestDrillFailover drills a failover under the rig's load, to a standby that lacks the last rows. The report says what
// the rig's own check counts, which knows nothing of drills.
func TestDrillFailover(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	program, err := testenv.Build(ctx, "github.com/walpost/walpost/cmd/walpost")
	if err != nil {
		t.Fatal(err)
	}
	w := newDrillWorld(ctx, t, program, true)
	observer := w.observe(ctx, 1)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	l := w.startLoad(writing, 1, 1000)
	report := w.drillFailover(ctx, t)
	l.finish()
	r := &result{}
	if r.Pending, err = w.settled(ctx); err != nil {
		t.Fatal(err)
	}
	if err := w.check(ctx, r); err != nil {
		t.Fatal(err)
	}
	observer.finish(r)
	own := w.countDrilled(ctx, t)
	t.Logf("the rig: %s phantoms=%d; of the drill: %+v", r, r.Phantoms, own)
	if len(r.Moments) > 0 || r.sum() > 0 || r.Phantoms == 0 {
		t.Errorf("the rig has found: %s, and %d phantoms", r.why(), r.Phantoms)
	}
	for what, n := range map[string][2]int{
		"lost":                  {int(report.Lost), r.Lost},
		"duplicated":            {int(report.Duplicated), r.Duplicated},
		"reordered":             {int(report.Reordered), r.Reordered},
		"phantoms":              {int(report.Phantoms), r.Phantoms},
		"committed":             {report.Events.Committed, own.rows},
		"stored":                {report.Events.Stored, own.stored},
		"phantoms of the drill": {report.Failover.Phantoms, own.phantoms},
	} {
		if n[0] != n[1] {
			t.Errorf("%s: the drill says %d, the rig counts %d", what, n[0], n[1])
		}
	}
	if !report.OK || report.Failover.Lost == 0 || report.Failover.Phantoms == 0 || report.Again == nil {
		t.Errorf("report %+v, failover %+v", report, report.Failover)
	}
}

// TestDrillFindsDefects drills relays with planted defects. The report counts what the rig's own check counts.
func TestDrillFindsDefects(t *testing.T) {
	for _, m := range mutants {
		kind, _, _ := strings.Cut(m.name, ":")
		count := map[string]func(*drill.Report, *result) (says int64, is int){
			"lost":       func(d *drill.Report, r *result) (int64, int) { return d.Lost, r.Lost },
			"duplicated": func(d *drill.Report, r *result) (int64, int) { return d.Duplicated, r.Duplicated },
			"swapped":    func(d *drill.Report, r *result) (int64, int) { return d.Reordered, r.Reordered },
		}[kind]
		if count == nil {
			continue
		}
		t.Run(kind, func(t *testing.T) {
			program, err := relayProgram(t.Context(), &m) // however long the compiler takes
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			w := newDrillWorld(ctx, t, program, false)
			var report drill.Report
			var failed error
			var says int64
			is := 0
			for tries := 0; is == 0 && tries < 10; tries++ { // the relay may be killed while nothing is in doubt
				report, failed = w.drillRelayKilled(ctx, t)
				r := &result{}
				if r.Pending, err = w.settled(ctx); err != nil {
					t.Fatal(err)
				}
				if err := w.check(ctx, r); err != nil {
					t.Fatal(err)
				}
				t.Logf("the rig: %s", r)
				says, is = count(&report, r)
			}
			if is == 0 || says != int64(is) || failed == nil || report.OK {
				t.Errorf("the drill says %d, the rig counts %d; it ended with %v, report %+v", says, is, failed, report)
			}
		})
	}
}

// drillRelayKilled runs the command. Its --kill has this process kill the relay, which is started again.
func (w *world) drillRelayKilled(ctx context.Context, t *testing.T) (report drill.Report, failed error) {
	asked, answered := filepath.Join(w.dir, "asked"), filepath.Join(w.dir, "answered")
	for _, file := range []string{asked, answered} { // of a drill before
		_ = os.Remove(file)
	}
	killed := make(chan error, 1)
	go func() {
		err := awaitFile(ctx, asked)
		if r := w.relays[0]; err == nil {
			r.up.Lock()
			err = r.life.Kill()
			r.up.Unlock()
		}
		killed <- err
		_ = os.WriteFile(answered, nil, 0o600)
	}()
	report, failed = w.runDrill(ctx, t, "relay-killed", "--for", "4s", "--rate", "1000",
		"--kill", fmt.Sprintf("touch %s; while [ ! -e %s ]; do sleep 0.05; done", asked, answered))
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	return report, failed
}

// newDrillWorld is servers that may be broken, and a relay that streams. The walsender does not wait for the standby.
func newDrillWorld(ctx context.Context, t *testing.T, program string, standby bool) *world {
	all, err := pgbin.All()
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(ctx, plan{
		version: all[0], replicas: 1, standby: standby, relays: 1, mode: "auto", onPoison: "hold",
		backoff: 50 * time.Millisecond, window: 100 * time.Millisecond, batch: "single", mark: marks[0],
	}, program, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	if err := w.exec(ctx, schemaSQL); err != nil {
		t.Fatal(err)
	}
	if err := w.exec(ctx, `ALTER DATABASE shop SET drill.allow = 'shop'`); err != nil {
		t.Fatal(err)
	}
	if w.heldBack {
		if err := w.primary.Reload(ctx, map[string]string{"synchronized_standby_slots": ""}); err != nil {
			t.Fatal(err)
		}
		w.heldBack = false
	}
	w.awaitLock(ctx, t)
	return w
}

func (w *world) awaitLock(ctx context.Context, t *testing.T) {
	err := w.until(ctx, "a relay streams", func(ctx context.Context) error {
		var streams bool
		err := w.query(ctx, `SELECT coalesce(bool_or(active AND confirmed_flush_lsn IS NOT NULL), false)
			FROM pg_replication_slots WHERE slot_name = $1`, []any{slotName}, &streams)
		if err == nil && !streams {
			err = errNotNow
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// drillFailover runs the command. Its --stop has this process fell the primary, while the standby is down.
func (w *world) drillFailover(ctx context.Context, t *testing.T) drill.Report {
	asked, answered := filepath.Join(w.dir, "asked"), filepath.Join(w.dir, "answered")
	stopped := make(chan error, 1)
	go func() {
		stopped <- w.fell(ctx, asked)
		_ = os.WriteFile(answered, nil, 0o600)
		_ = w.until(ctx, "the standby is promoted", func(ctx context.Context) error {
			conn, err := pgx.Connect(ctx, w.replica.URL(w.db))
			if err != nil {
				return err
			}
			defer conn.Close(ctx) //nolint:errcheck // it was only asked
			var standby bool
			if err := conn.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil || standby {
				return errNotNow
			}
			w.promoted.Store(true)
			return nil
		})
	}()
	report, err := w.runDrill(ctx, t, "failover", "--for", "6s", "--rate", "200",
		"--standby", fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", w.pgProxies[1].Addr(), w.db),
		"--stop", fmt.Sprintf("touch %s; while [ ! -e %s ]; do sleep 0.05; done", asked, answered))
	if err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	return report
}

// runDrill returns the report, and how the command has ended.
func (w *world) runDrill(ctx context.Context, t *testing.T, args ...string) (report drill.Report, failed error) {
	cmd := exec.CommandContext(ctx, w.program, append([]string{"drill"}, append(args, "--json", "--yes")...)...)
	cmd.Dir, cmd.Env = w.dir, w.env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, failed := cmd.Output()
	t.Logf("walpost drill: %v\n%s%s", failed, stderr.String(), out)
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatal(err)
	}
	return report, failed
}

// fell lets the primary commit what the standby never gets, and crash.
func (w *world) fell(ctx context.Context, asked string) error {
	if err := awaitFile(ctx, asked); err != nil {
		return err
	}
	if err := w.replica.Stop(ctx, testenv.Fast); err != nil {
		return err
	}
	time.Sleep(time.Second)
	if err := w.primary.Stop(ctx, testenv.Immediate); err != nil {
		return err
	}
	return w.replica.Start(ctx)
}

func awaitFile(ctx context.Context, name string) error {
	for {
		if _, err := os.Stat(name); err == nil {
			return nil
		}
		if !sleep.For(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// drilled is what stream and table have of the drill's events.
type drilled struct{ rows, stored, phantoms int }

func (w *world) countDrilled(ctx context.Context, t *testing.T) (d drilled) {
	conn, err := w.connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx) //nolint:errcheck // it was only read
	rows, err := readRows(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, row := range rows {
		if strings.Contains(row.Payload, `"drill"`) {
			d.rows++
			known[key(row.Ref.ID, row.Ref.Hash)] = true
		}
	}
	reader := w.reader()
	err = reader.Read(ctx, func(m audit.Message) {
		switch {
		case !strings.Contains(m.Body, `"drill"`):
		case known[key(m.ID.ID, m.ID.Hash)]:
			d.stored++
		default:
			d.phantoms++
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}
