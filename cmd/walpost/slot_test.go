package main

import (
	"bytes"
	"context"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walpost/walpost/internal/testenv"
)

// fails runs a command that is to end with exit code 1, and returns what it says.
func (o *office) fails(args ...string) string {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	if code := execute(o.t.Context(), append(args, "--config", o.config), &stdout, &stderr); code != exitFailed {
		o.t.Fatalf("walpost %s ended with %d: %s%s", strings.Join(args, " "), code, &stdout, &stderr)
	}
	return stderr.String()
}

// wantText compares with regular expressions in which ^ and $ are those of lines.
func wantText(t *testing.T, got string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile("(?ms)" + p).MatchString(got) {
			t.Errorf("it says %q, want %s", got, p)
		}
	}
}

func (o *office) slots() string {
	return o.text(`SELECT coalesce(string_agg(slot_name, ' ' ORDER BY slot_name), 'none') FROM pg_replication_slots WHERE database = current_database()`)
}

func (o *office) connect() *pgx.Conn {
	conn, err := pgx.ConnectConfig(o.t.Context(), o.conn.Config())
	o.must(err)
	o.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// TestSlotCreateAndDrop on every version: the relay's own slot, and nobody else's.
func TestSlotCreateAndDrop(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
		name := o.stream.Name
		equal(t, "drop says", o.walpost("slot", "drop"), "there is no slot "+name+"\n")
		wantText(t, o.walpost("slot", "show"), name+": does not exist")
		wantText(t, o.fails("slot", "create"), `^error: publication "walpost": publication does not exist\nhint: run .walpost migrate up`)
		equal(t, "slots", o.slots(), "none")

		o.walpost("migrate", "up")
		wantText(t, o.fails("slot", "create", "--mode", "poll"), "mode is poll")
		wantText(t, o.walpost("slot", "create"), "^created +"+name+": pgoutput, database ")
		wantText(t, o.fails("slot", "create"), `^error: slot ".*" exists\nhint: `)
		show := o.walpost("slot", "show")
		wantText(t, show, name+": pgoutput, database ", `^  in use by +nobody$`)
		equal(t, "failover", strings.Contains(show, ", failover"), pg.Version() >= 17)

		o.exec(`SELECT pg_create_logical_replication_slot('` + name + `_new', 'pgoutput')`)
		wantText(t, o.walpost("slot", "drop"), "^dropped slot "+name+"\n.*nothing is lost")
		equal(t, "slots", o.slots(), name+"_new")
		o.exec(`SELECT pg_drop_replication_slot('` + name + `_new')`)

		stop := o.relay()
		o.eventually("the relay streams", func() bool { return o.status().Relay.Mode == "stream" })
		for _, c := range []string{"create", "drop"} {
			wantText(t, o.fails("slot", c), `^error: a relay holds the lock of this slot: process \d+, walpost \(role .*\) from 127.0.0.1, connected `)
		}
		equal(t, "slots", o.slots(), name)
		stop()
		o.walpost("slot", "drop")
	})
}

// TestSlotDropLeavesAlone what is in use or somebody else's.
func TestSlotDropLeavesAlone(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	name := o.stream.Name
	o.walpost("migrate", "up")
	o.walpost("slot", "create")

	cfg := o.conn.Config().Copy()
	cfg.RuntimeParams["replication"], cfg.RuntimeParams["application_name"] = "database", "a spy"
	spy, err := pgx.ConnectConfig(t.Context(), cfg)
	o.must(err)
	defer spy.Close(context.Background()) //nolint:errcheck // it ends the streaming
	spy.PgConn().Frontend().SendQuery(&pgproto3.Query{String: `START_REPLICATION SLOT "` + name + `" LOGICAL 0/0 (proto_version '1', publication_names 'walpost')`})
	o.must(spy.PgConn().Frontend().Flush())
	o.eventually("the slot is in use", func() bool { s := o.status().Slot; return s.Exists && s.ActivePID != nil })
	equal(t, "mode", o.status().Relay.Mode, "none")
	wantText(t, o.walpost("status"), `^note: process \d+ streams slot `+name+` and holds no lock`)
	wantText(t, o.fails("slot", "drop"), `is in use by process \d+, a spy \(role `)
	equal(t, "slots", o.slots(), name)
	_ = spy.PgConn().Conn().Close()
	o.eventually("the slot is free", func() bool { return o.status().Slot.ActivePID == nil })
	o.walpost("slot", "drop")

	o.exec(`SELECT pg_create_physical_replication_slot('` + name + `')`)
	wantText(t, o.fails("slot", "drop"), "no relay's of this database: .physical")
	wantText(t, o.fails("slot", "create"), "exists")
	for _, c := range []struct{ args, is string }{{"'test_decoding'", "test_decoding "}, {"'pgoutput', false, true", "pgoutput .* two_phase"}} {
		o.exec(`SELECT pg_drop_replication_slot('` + name + `')`)
		o.exec(`SELECT pg_create_logical_replication_slot('` + name + `', ` + c.args + `)`)
		wantText(t, o.fails("slot", "drop"), "no relay's of this database: ."+c.is)
	}
	o.exec(`SELECT pg_drop_replication_slot('` + name + `')`)
	o.must(pg.Exec(t.Context(), "postgres", `SELECT pg_create_logical_replication_slot('`+name+`', 'pgoutput')`))
	wantText(t, o.fails("slot", "drop"), "no relay's of this database: .*database postgres")
	equal(t, "the other one's slot", o.text(`SELECT count(*) FROM pg_replication_slots`), "1")
}

// TestSlotCreateWaits for others' transactions, says for whom, and leaves nothing behind.
func TestSlotCreateWaits(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	other := o.connect()
	_, err := other.Exec(t.Context(), `SET application_name = 'forgotten'; BEGIN; SELECT pg_current_xact_id()`)
	o.must(err)
	wantText(t, o.fails("slot", "create", "--wait", "3s"), "^waiting for pid \\d+, application 'forgotten'", `error: create slot .*: not within 3s; it waited for pid \d+, application 'forgotten'`)
	o.eventually("the creation has ended", func() bool { return o.slots() == "none" })
	equal(t, "lock", o.status().Relay.Mode, "none")
	created := make(chan int, 1)
	go func() {
		created <- execute(t.Context(), []string{"slot", "create", "--config", o.config}, io.Discard, io.Discard)
	}()
	o.eventually("the slot is being created", func() bool { s := o.status().Slot; return s.Exists && s.ActivePID != nil })
	wantText(t, o.walpost("status"), "^  confirmed +nothing: it is being created")
	_, err = other.Exec(t.Context(), `ROLLBACK`)
	o.must(err)
	equal(t, "exit code", <-created, 0)
	o.walpost("slot", "drop")
	// A relay waits in the same way, and polls meanwhile.
	_, err = other.Exec(t.Context(), `BEGIN; SELECT pg_current_xact_id()`)
	o.must(err)
	stop := o.relay()
	o.eventually("the relay makes its slot", func() bool {
		return o.text(`SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%\_new' AND active`) == "1"
	})
	equal(t, "mode", o.status().Relay.Mode, "poll")
	wantText(t, o.walpost("status"), "^relay +polls, or prepares to stream")
	_, err = other.Exec(t.Context(), `ROLLBACK`)
	o.must(err)
	o.eventually("the relay streams", func() bool { return o.status().Relay.Mode == "stream" })
	stop()
	o.walpost("slot", "drop")
	o.walpost("slot", "create")
}

// TestASlotMadeByHand is used as it is. Rows from before it are delivered first, from the table. So are those that an earlier
// slot of its name has not brought.
func TestASlotMadeByHand(t *testing.T) {
	o := newOffice(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.walpost("migrate", "up")
	const insert = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'soon.%s', '{}')`
	o.exec(strings.ReplaceAll(insert, "%s", "before"))
	for n := 1; n <= 2; n++ {
		if n == 2 {
			o.walpost("slot", "drop")
			o.exec(strings.ReplaceAll(insert, "%s", "before"))
		}
		o.walpost("slot", "create")
		o.exec(strings.ReplaceAll(insert, "%s", "after"))
		confirmed := o.status().Slot.Confirmed
		stop := o.relay()
		o.eventually("both are marked, and the slot brings what follows", func() bool {
			return o.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == strconv.Itoa(2*n) &&
				o.text(`SELECT count(*) FROM outbox_sent WHERE published_as IS NOT NULL`) == "1"
		})
		stop()
		all := o.messages()
		equal(t, "messages", len(all), 2*n)
		last := all[2*n-2:]
		equal(t, "order", last[0].Subject+" "+last[1].Subject, o.stream.Name+".soon.before "+o.stream.Name+".soon.after")
		equal(t, "the row from before came", last[0].Header.Get("Walpost-Via"), "poll")
		equal(t, "the same slot", o.text(`SELECT pg_wal_lsn_diff(confirmed_flush_lsn, '`+confirmed+`') > 0 FROM pg_replication_slots WHERE database = current_database()`), "true")
	}
	o.walpost("slot", "drop")
}

// TestDoctorBesideAnotherSlot: a new slot begins with the catalog_xmin of one that lags, and so looks older than its
// publication once the other one is gone. It has confirmed the publication by then, and doctor says nothing.
func TestDoctorBesideAnotherSlot(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	o := newOffice(t, pg, testenv.NewNATS(t, testenv.NATSOptions{}), "{table: public.outbox_messages}")
	o.exec(`SELECT pg_create_logical_replication_slot('lags', 'pgoutput')`)
	o.walpost("migrate", "up")
	defer o.relay()()
	o.untilStreaming()
	o.exec(`SELECT pg_drop_replication_slot('lags')`)
	if out := o.walpost("doctor"); strings.Contains(out, "publication-newer") {
		t.Errorf("doctor says\n%s", out)
	}
	if o.text(`SELECT age(p.xmin) <= age(s.catalog_xmin) FROM pg_publication p, pg_replication_slots s`) != "true" {
		t.Error("the slot does not look older than the publication: the test shows nothing")
	}
}
