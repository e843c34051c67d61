package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
)

// hugeSQL inserts rows of an aggregate with a payload of so many MiB, which compresses well.
const hugeSQL = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
	SELECT 1, 'huge', $1::int, 'order.placed', jsonb_build_object('pad', repeat('x', $2::int << 20)) FROM generate_series(1, $3::int)`

// TestHugeRows: rows of 120 and 250 MB are pending before a first start, come by the WAL,
// and are tried again until they are dead letters. With less data one of them is still larger than what the relay
// may occupy. The relay's memory stays small, and the
// rows before and behind them are delivered at once, those of their own aggregate when
// they are dead.
func TestHugeRows(t *testing.T) {
	needsProc(t)
	t.Parallel()
	r := newRigWith(t, testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	large, larger := testenv.Size(t, 12, 120), testenv.Size(t, 72, 250) // MiB
	batch := func(n, many int) {
		r.exec(putSQL, "order.placed", n, n)
		r.exec(hugeSQL, n, large, many) // in one transaction
		r.exec(hugeSQL, n+1, larger, 1)
		r.exec(hugeSQL, n+1, 0, 1) // it waits for the one before
		r.exec(putSQL, "order.placed", n+1, n+1)
	}
	batch(10, 1)
	p := r.launch("WALPOST_FALLBACK_BACKOFF=1s", "WALPOST_FALLBACK_MAX_ATTEMPTS=1")
	stored := func(what string, want uint64) {
		t.Helper()
		eventually(t, what, func() bool { return p.ended() || r.storedCount() >= want })
		if p.ended() {
			t.Fatalf("%s: the relay has ended: %v", what, p.prog.Err())
		}
		t.Logf("%s: %s of memory", what, mib(p.peak()))
	}
	stored("rows beside huge ones in the table", 2)
	p.awaitState("streaming")
	batch(20, 4)
	stored("rows beside huge ones in the WAL", 4)
	eventually(t, "the huge rows are dead letters", func() bool {
		return p.ended() || r.query1(`SELECT count(*) FROM outbox_messages_dlq`) == "7"
	})
	stored("rows behind the dead letters", 6)
	p.bounded()
	sizes := r.query1(`SELECT string_agg(DISTINCT substring(last_error FROM '^size: .* has ([0-9]+) bytes'), ' ') FROM outbox_messages_dlq`)
	if want := fmt.Sprintf("%d %d", large<<20+len(`{"pad": ""}`), larger<<20+len(`{"pad": ""}`)); sizes != want {
		t.Errorf("the dead letters speak of %s bytes, want %s", sizes, want)
	}
	p.terminate()
}

// TestHugestRow: a text of 900 MB, or of more than the relay may occupy.
func TestHugestRow(t *testing.T) {
	needsProc(t)
	t.Parallel()
	r := newRigWith(t, testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	r.exec(`ALTER TABLE outbox_messages ALTER payload TYPE text`)
	p := r.launch("WALPOST_FALLBACK_BACKOFF=1s", "WALPOST_FALLBACK_MAX_ATTEMPTS=2").awaitState("streaming")
	seen := r.watchWalsender()
	bytes := testenv.Size(t, 80_000_000, 900_000_000)
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'huge', 900, 'order.placed', CASE g WHEN 1 THEN repeat('x', $1::int) ELSE '{}' END FROM generate_series(1, 2) g`, bytes)
	r.exec(putSQL, "order.placed", 1, 1)
	eventually(t, "the row behind it is stored", func() bool { return p.ended() || r.storedCount() >= 1 })
	eventually(t, "it is a dead letter", func() bool { return p.ended() || r.query1(`SELECT count(*) FROM outbox_messages_dlq`) == "1" })
	eventually(t, "the next row of its aggregate is stored", func() bool { return p.ended() || r.storedCount() >= 2 })
	if p.ended() {
		t.Fatalf("the relay has ended: %v", p.prog.Err())
	}
	// While the server makes a text of the value it hears nobody, and counts no time.
	if s := seen(); len(s.pids) != 1 {
		t.Errorf("walsenders %v were seen, want one: a timeout or a lost connection ended it", s.pids)
	}
	t.Logf("%s of memory", mib(p.peak()))
	p.bounded()
	if text := r.query1(`SELECT last_error FROM outbox_messages_dlq`); !strings.Contains(text, fmt.Sprintf("%d bytes", bytes)) {
		t.Errorf("the dead letter says %q", text)
	}
	if n := r.query1(`SELECT count(*) FROM (SELECT FROM outbox_messages WHERE octet_length(payload) = $1::int
		UNION ALL SELECT FROM outbox_messages_dlq WHERE octet_length(original ->> 'payload') = $1::int) x`, bytes); n != "1" {
		t.Errorf("the value is %s times in the database, want once", n)
	}
	p.terminate()
}

// TestTooLongValues: whichever values of a row are too long, the row is recorded with
// their size, or goes out where no field is mapped to them.
func TestTooLongValues(t *testing.T) {
	t.Parallel()
	for _, fromTable := range []bool{false, true} {
		t.Run(map[bool]string{false: "wal", true: "table"}[fromTable], func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Retry = table.Retry{Backoff: time.Hour, MaxAttempts: 10}
			r.exec(`ALTER TABLE outbox_messages ADD extra text, ADD more jsonb`)
			if !fromTable {
				r.start().streaming()
			}
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id, last_error, extra, more) VALUES
				('a', 1, 'order.placed', '{"n": 1}', NULL, NULL, repeat('x', 3 << 20), to_jsonb(repeat('x', 3 << 20))),
				('b', 1, 'order.placed', to_jsonb(repeat('x', 3 << 20)), repeat('x', 70000), NULL, repeat('x', 3 << 20), NULL),
				('c', 1, repeat('x', 3 << 20), '{"n": 3}', NULL, NULL, NULL, NULL),
				(repeat('d', 3 << 20), 1, 'order.placed', '{"n": 4}', NULL, NULL, NULL, NULL),
				('e', 1, 'order.placed', to_jsonb(repeat('x', 1 << 20)), NULL, NULL, NULL, NULL),
				('f', 1, 'order.placed', jsonb_build_object('n', 6, 'pad', repeat('x', 1040000)), NULL, NULL, repeat('x', 100000), NULL),
				('b', 1, 'order.placed', '{"n": 7}', NULL, NULL, NULL, NULL);
				SELECT pg_logical_emit_message(true, 'x', repeat('x', 3 << 20))`)
			if fromTable {
				r.start()
			}
			r.put(8, 8)
			want := "1 6 8"
			eventually(t, "the rows around them are stored", func() bool { return r.storedCount() >= 3 })
			eventually(t, "the others are recorded", func() bool {
				return r.count(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) == 5
			})
			numbers := r.numbers()
			slices.Sort(numbers)
			if got := strings.Trim(fmt.Sprint(numbers), "[]"); got != want {
				t.Errorf("stored are %s, want %s", got, want)
			}
			got := r.query1(`SELECT string_agg(concat_ws('|', id, attempts, last_error), E'\n' ORDER BY id) FROM outbox_messages WHERE last_error IS NOT NULL`)
			if want := strings.Join([]string{
				`2|1|size: column "payload" has 3145730 bytes, a message at most 1048576`,
				`3|1|headers: column "event_type" has 3145728 bytes, headers at most 65535`,
				`4|1|headers: column "aggregate_type" has 3145728 bytes, headers at most 65535`,
				`5|1|size: column "payload" has 1048578 bytes, a message at most 1048576`,
				`7|0|held: an earlier row of its aggregate has failed`,
			}, "\n"); got != want {
				t.Errorf("recorded are\n%s\nwant\n%s", got, want)
			}
		})
	}
}
