package table_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// replayable makes rows that were delivered: of each ten, three are in the archive.
func (b *bench) replayable(rows int) {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		SELECT n, 'order', n % 7, 'order.placed', jsonb_build_object('n', n), now() - interval '1 day', now() - interval '1 hour' + n / 20 * interval '1 ms'
		FROM generate_series(1, $1::int) n`, rows)
	b.exec(`WITH gone AS (DELETE FROM outbox_messages WHERE id % 10 < 3 RETURNING *)
		INSERT INTO outbox_messages_archive SELECT 'app.outbox_messages', * FROM gone`)
}

// replayIDs reads rows from a cursor on. each may end it.
func (b *bench) replayIDs(c table.ReplayChoice, from table.ReplayCursor, each func(table.ReplayRow) error) (ids []int, err error) {
	b.t.Helper()
	r, err := table.OpenReplay(b.t.Context(), b.config(), b.table, c, from, 1<<20)
	b.must(err)
	defer r.Close()
	err = r.Read(b.t.Context(), func(rows []table.ReplayRow) error {
		for _, row := range rows {
			id, _ := strconv.Atoi(string(row.Values[outbox.ID]))
			ids = append(ids, id)
			if err := each(row); err != nil {
				return err
			}
		}
		return nil
	})
	return ids, err
}

func upTo(n int) (ids []int) {
	for i := range n {
		ids = append(ids, i+1)
	}
	return ids
}

// TestReplayRows: rows of outbox and archive come in one order, and from a cursor on what is left of it. A row that
// moves to the archive meanwhile comes once.
func TestReplayRows(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newAppBench(t, pg, outbox.MarkUpdate)
		b.replayable(3000)
		pass := func(table.ReplayRow) error { return nil }
		got, err := b.replayIDs(table.ReplayChoice{}, table.ReplayCursor{}, pass)
		if b.must(err); !slices.Equal(got, upTo(3000)) {
			t.Errorf("read %d rows, not in order", len(got))
		}
		for cut := 0; cut < 3000; cut += 411 {
			var last table.ReplayCursor
			enough := errors.New("enough")
			first, err := b.replayIDs(table.ReplayChoice{}, table.ReplayCursor{}, func(r table.ReplayRow) error {
				last = table.ReplayCursor{At: r.At, ID: string(r.Values[outbox.ID])}
				if last.ID == fmt.Sprint(cut) {
					return enough
				}
				return nil
			})
			if cut > 0 && !errors.Is(err, enough) {
				t.Fatal(err)
			}
			if cut == 0 {
				first, last = nil, table.ReplayCursor{}
			}
			b.exec(`WITH gone AS (DELETE FROM outbox_messages WHERE id % 1000 < $1 / 3 RETURNING *)
				INSERT INTO outbox_messages_archive SELECT 'app.outbox_messages', * FROM gone`, cut)
			rest, err := b.replayIDs(table.ReplayChoice{}, last, pass)
			if b.must(err); !slices.Equal(append(first, rest...), upTo(3000)) {
				t.Errorf("%d rows before row %d and %d behind it", len(first), cut, len(rest))
			}
		}
		if counts, err := b.db.CountReplay(t.Context(), b.table, table.ReplayChoice{AggregateID: new("3")}, 100_000); err != nil ||
			fmt.Sprint(counts) != "[{order.placed 429}]" {
			t.Errorf("counted %v, %v", counts, err)
		}
	})
}

// TestReplayRowsThatAreLarge are read a few at a time, and of one that no message can hold only the length.
func TestReplayRowsThatAreLarge(t *testing.T) {
	b := newAppBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.replayable(10)
	b.exec(`UPDATE outbox_messages SET payload = to_jsonb(repeat('x', 900000)) WHERE id <> 7`)
	b.exec(`UPDATE outbox_messages SET payload = to_jsonb(repeat('x', 3000000)) WHERE id = 7`)
	got, err := b.replayIDs(table.ReplayChoice{}, table.ReplayCursor{}, func(r table.ReplayRow) error {
		if omitted := len(r.Omitted) > 0; omitted != (string(r.Values[outbox.ID]) == "7") {
			t.Errorf("row %s: omitted %v", r.Values[outbox.ID], r.Omitted)
		}
		return nil
	})
	if b.must(err); !slices.Equal(got, upTo(10)) {
		t.Errorf("read %v", got)
	}
}

// TestReplayPassesOverAnUnreadableRow: one that the server cannot send comes with its id alone, and each of the others
// once, also those that one FETCH has brought before it.
func TestReplayPassesOverAnUnreadableRow(t *testing.T) {
	b := newAppBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.replayable(10)
	b.exec(`CREATE CAST (bigint AS timestamptz) WITHOUT FUNCTION`)
	for _, relation := range []string{"outbox_messages", "outbox_messages_archive"} {
		b.exec(`ALTER TABLE ` + relation + ` ALTER trace_id TYPE timestamptz USING NULL`)
		b.exec(`UPDATE ` + relation + ` SET trace_id = (-9000000000000000000)::bigint::timestamptz WHERE id = 5`)
	}
	got, err := b.replayIDs(table.ReplayChoice{}, table.ReplayCursor{}, func(r table.ReplayRow) error {
		if id := string(r.Values[outbox.ID]); (r.Unreadable != nil) != (id == "5") {
			t.Errorf("row %s: %v", id, r.Unreadable)
		}
		return nil
	})
	if b.must(err); !slices.Equal(got, upTo(10)) {
		t.Errorf("read %v", got)
	}
}

// TestReplayEndsWithItsContext: a reader whose rows are not taken ends with its context, and leaves no connection.
func TestReplayEndsWithItsContext(t *testing.T) {
	b := newAppBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.replayable(1000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := table.OpenReplay(ctx, b.config(), b.table, table.ReplayChoice{}, table.ReplayCursor{}, 1<<20)
	b.must(err)
	defer r.Close()
	err = r.Read(ctx, func([]table.ReplayRow) error {
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("read ends with %v", err)
	}
}

// TestReplayRequests: a request is open until it has ended, and is one slot's.
func TestReplayRequests(t *testing.T) {
	b := newAppBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	ctx := t.Context()
	id, err := b.db.RequestReplay(ctx, &table.Replay{Slot: "one", Outbox: "public.outbox_messages"})
	b.must(err)
	if next, err := b.db.NextReplay(ctx, "two", nil); err != nil || next != nil {
		t.Errorf("slot two has %v, %v", next, err)
	}
	r, err := b.db.NextReplay(ctx, "one", nil)
	if b.must(err); r == nil || r.ID != id || r.State != table.ReplayRequested || r.Until == nil {
		t.Fatalf("slot one has %+v", r)
	}
	if ok, err := b.db.AdvanceReplay(ctx, r); err != nil || ok {
		t.Errorf("a request that has not begun is advanced: %v", err)
	}
	cursor := table.ReplayCursor{Created: time.Now().Truncate(time.Microsecond), Sequence: 7}
	ok, err := b.db.BeginReplay(ctx, id, cursor)
	if b.must(err); !ok {
		t.Error("it does not begin")
	}
	r.Sent, r.Cursor = 5, table.ReplayCursor{At: "2026-01-02 03:04:05.678901+00", ID: "12", Created: cursor.Created, Sequence: 99}
	ok, err = b.db.AdvanceReplay(ctx, r)
	if b.must(err); !ok {
		t.Error("it is not advanced")
	}
	again, err := b.db.NextReplay(ctx, "one", nil)
	if b.must(err); !again.Cursor.Created.Equal(cursor.Created) || again.Cursor.At != r.Cursor.At || again.Cursor.ID != "12" || again.Cursor.Sequence != 99 || again.Sent != 5 {
		t.Errorf("read back as %+v", again)
	}
	for _, want := range []bool{true, false} {
		if ok, err := b.db.CancelReplay(ctx, id); err != nil || ok != want {
			t.Errorf("cancelled %v, %v, want %v", ok, err, want)
		}
	}
	if ok, err := b.db.AdvanceReplay(ctx, r); err != nil || ok {
		t.Errorf("a request that was cancelled is advanced: %v", err)
	}
	if _, err := b.db.ReadReplay(ctx, 99); !errors.Is(err, table.ErrNoReplay) || !strings.Contains(err.Error(), "replay 99") {
		t.Errorf("a request that is not there: %v", err)
	}
}
