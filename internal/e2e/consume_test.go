package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

var consumeExamples = []example{
	{name: "node", command: []string{"node", "consume.mjs"}, node: true},
	{name: "psycopg", command: []string{"/usr/bin/python3", "consume.py"}},
}

// TestConsumeExamples: each example is killed while it works, again and again, and then each event has had its effect
// once, in order. In a database in SQL_ASCII drivers may return other types.
func TestConsumeExamples(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	relay := r.start()
	r.awaitStreaming()
	dir := r.copyExamples()
	const events = 300
	r.exec(fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n, 'order.placed', jsonb_build_object('total', n * 10) FROM generate_series(1, %d) n`, events))
	r.awaitSettled()
	for _, e := range consumeExamples {
		for _, encoding := range []string{"UTF8", "SQL_ASCII"} {
			t.Run(e.name+"/"+encoding, func(t *testing.T) {
				e.need(t, dir)
				r := r.consumer(t, e.name, encoding)
				r.refuseUnknownAnswer(e, filepath.Join(dir, "consume"))
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
	}
	relay.stop()
}

// consumer is the rig with another database: that of a consumer.
func (r *rig) consumer(t *testing.T, name, encoding string) *rig {
	c := *r
	c.t = t
	database := "consumer_" + name + "_" + strings.ToLower(encoding)
	r.exec(fmt.Sprintf(`CREATE DATABASE %s ENCODING '%s' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'`, database, encoding))
	c.url = r.pg.URL(database)
	if out, err := c.command("migrate", "up", "--only", "consumer").CombinedOutput(); err != nil {
		t.Fatalf("walpost migrate up: %v\n%s", err, out)
	}
	c.exec(`CREATE TABLE invoices (number BIGINT GENERATED ALWAYS AS IDENTITY, order_id TEXT NOT NULL, total INTEGER NOT NULL)`)
	return &c
}

// refuseUnknownAnswer has walpost_advance move the position and then return an answer that means no commit.
func (r *rig) refuseUnknownAnswer(e example, dir string) {
	r.t.Helper()
	r.exec(`ALTER FUNCTION walpost_advance RENAME TO walpost_advance_real;
		CREATE FUNCTION walpost_advance(TEXT, INTEGER, BIGINT, BIGINT, TEXT, TEXT, TIMESTAMPTZ) RETURNS TEXT LANGUAGE sql AS
		$$ SELECT walpost_advance_real($1, $2, $3, $4, $5, $6, $7); SELECT 'fenced'::text $$`)
	c := r.startConsumer(e, dir)
	err := c.wait()
	if err == nil || !strings.Contains(c.text, "fenced") {
		r.t.Errorf("with an answer that it does not know it ends with %v\n%s", err, c.text)
	}
	var settled int
	r.query(`SELECT coalesce(max(last_processed_id), -1) FROM consumer_offsets`, &settled)
	if settled != 0 {
		r.t.Errorf("the position is %d, want 0\n%s", settled, c.text)
	}
	r.exec(`DROP FUNCTION walpost_advance; ALTER FUNCTION walpost_advance_real RENAME TO walpost_advance`)
}

// consuming is an example that runs, and its child.
type consuming struct {
	t     *testing.T
	cmd   *exec.Cmd
	ended chan struct{} // is closed when both have ended
	text  string        // what they wrote
}

func (r *rig) startConsumer(e example, dir string) *consuming {
	r.t.Helper()
	cmd := exec.Command(e.command[0], e.command[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DATABASE_URL="+r.url, "NATS_URL="+r.nats.URL(), "WALPOST_NATS_URL="+r.nats.URL(),
		"PATH="+filepath.Dir(r.program)+":"+os.Getenv("PATH"))
	read, write, err := os.Pipe()
	r.must(err)
	defer write.Close()
	cmd.Stdout, cmd.Stderr = write, write
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r.must(cmd.Start())
	c := &consuming{t: r.t, cmd: cmd, ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		defer read.Close()
		text, _ := io.ReadAll(read)
		c.text = string(text)
	}()
	return c
}

func (c *consuming) wait() error {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(testenv.Patience / 4):
		c.t.Error("it, or its child, has not ended")
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
		<-c.ended
	}
	return c.cmd.Wait()
}

// killUntilDone ends the example after every fifty or so effects, by either signal.
func (r *rig) killUntilDone(e example, dir string, events int) {
	r.t.Helper()
	invoices := func() (n int) {
		r.query(`SELECT count(*) FROM invoices`, &n)
		return n
	}
	signal := syscall.SIGTERM
	for target := 50; invoices() < events; target += 50 {
		c := r.startConsumer(e, dir)
		if !c.until(func() bool { return invoices() >= min(target, events) }) {
			_ = c.wait()
			r.t.Fatalf("it ends with %d of %d effects\n%s", invoices(), events, c.text)
		}
		r.must(c.cmd.Process.Signal(signal))
		_ = c.wait()
		signal = syscall.SIGTERM + syscall.SIGKILL - signal
	}
}

// until is false where the example ends first, and where it takes too long.
func (c *consuming) until(reached func() bool) bool {
	late := time.After(testenv.Patience / 4)
	for !reached() {
		select {
		case <-late:
			_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
			return false
		case <-c.ended:
			return false
		case <-time.After(time.Millisecond):
		}
	}
	return true
}
