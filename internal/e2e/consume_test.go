package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestConsumeExamples: each example is killed while it works, again and again, and then each event has had its effect
// once, in order.
func TestConsumeExamples(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.exec(`CREATE TABLE invoices (number BIGINT GENERATED ALWAYS AS IDENTITY, order_id TEXT NOT NULL, total INTEGER NOT NULL)`)
	relay := r.start()
	r.awaitStreaming()
	dir := r.copyExamples()
	const events = 300
	r.exec(fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n, 'order.placed', jsonb_build_object('total', n * 10) FROM generate_series(1, %d) n`, events))
	r.awaitSettled()
	for _, e := range []example{
		{name: "node", command: []string{"node", "consume.mjs"}, node: true},
		{name: "psycopg", command: []string{"/usr/bin/python3", "consume.py"}},
	} {
		t.Run(e.name, func(t *testing.T) {
			e.need(t, dir)
			r := *r
			r.t = t
			r.exec(`TRUNCATE invoices`)
			r.killUntilDone(e, filepath.Join(dir, "consume"), events)
			var wrong string
			r.query(fmt.Sprintf(`SELECT coalesce(string_agg(order_id, ' '), 'none') FROM (
				SELECT order_id, row_number() OVER (ORDER BY number) AS n, total FROM invoices) i
				WHERE order_id <> n::text OR total <> n * 10 OR n > %d`, events), &wrong)
			if wrong != "none" {
				t.Errorf("invoices out of order or twice: %s", wrong)
			}
		})
	}
	relay.stop()
}

// killUntilDone kills the example after every fifty or so effects.
func (r *rig) killUntilDone(e example, dir string, events int) {
	r.t.Helper()
	invoices := func() (n int) {
		r.query(`SELECT count(*) FROM invoices`, &n)
		return n
	}
	begun := time.Now()
	for target := 50; invoices() < events; target += 50 {
		cmd := exec.Command(e.command[0], e.command[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DATABASE_URL="+r.url, "NATS_URL="+r.nats.URL(), "WALPOST_NATS_URL="+r.nats.URL(),
			"PATH="+filepath.Dir(r.program)+":"+os.Getenv("PATH"))
		log, err := os.Create(filepath.Join(r.t.TempDir(), "log"))
		r.must(err)
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it has a child
		r.must(cmd.Start())
		for invoices() < min(target, events) && time.Since(begun) < testenv.Patience/4 {
			time.Sleep(time.Millisecond)
		}
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
		if time.Since(begun) > testenv.Patience/4 {
			text, _ := os.ReadFile(log.Name())
			r.t.Fatalf("%d of %d effects\n%s", invoices(), events, text)
		}
	}
}
