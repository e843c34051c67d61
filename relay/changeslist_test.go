package relay_test

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/walpost/walpost/internal/testenv"
)

// change is something that people change. It returns false where there is nothing to change.
type change struct {
	name string
	// asItRuns: it may happen beside the relay, which is stopped later.
	asItRuns bool
	// drained: nothing that was stored may be unmarked, and the relay is stopped by SIGTERM.
	drained bool
	do      func(*changing) bool
}

func changes() []change {
	return []change{
		{name: "table renamed", asItRuns: true, do: func(c *changing) bool {
			b := c.box()
			name := c.unused(b.now.name)
			c.exec(`ALTER TABLE ` + b.now.sql() + ` RENAME TO ` + name)
			b.name, b.now.name = name, name
			return true
		}},
		{name: "schema changed", asItRuns: true, do: func(c *changing) bool {
			b := c.box()
			to := map[string]string{"public": "app", "app": "public"}[b.schema]
			c.exec(`ALTER TABLE ` + b.now.sql() + ` SET SCHEMA ` + to)
			b.schema, b.now.schema = to, to
			return true
		}},
		{name: "database renamed", do: func(c *changing) bool {
			name := c.unused(c.database())
			c.quiesced("the database is renamed", fmt.Sprintf(`ALTER DATABASE %s RENAME TO %s`, c.database(), name))
			c.moveTo(c.pg, name)
			return true
		}},
		{name: "table replaced", asItRuns: true, do: func(c *changing) bool {
			b := c.box()
			was, is := b.now, &changingTable{schema: b.schema, name: b.name}
			c.setAside(b)
			made := fmt.Sprintf("made%d", c.aside) // its indexes have no name that another table's may get
			c.exec(fmt.Sprintf(`CREATE TABLE %s.%s (LIKE %s INCLUDING ALL); ALTER TABLE %[1]s.%[2]s RENAME TO %[4]s`, is.schema, made, was.sql(), is.name))
			c.guard(is.schema, is.name)
			b.now = is
			c.walpost("migrate", "up")
			return true
		}},
		{name: "swapped back", asItRuns: true, do: func(c *changing) bool {
			b := c.box()
			if len(b.before) == 0 {
				return false
			}
			c.swapBack(b, c.rng.IntN(len(b.before)))
			return true
		}},
		{name: "table restored", do: func(c *changing) bool {
			b := c.box()
			t := b.now.sql()
			c.exec(fmt.Sprintf(`CREATE TABLE %[3]s (LIKE %[1]s INCLUDING ALL); INSERT INTO %[3]s OVERRIDING SYSTEM VALUE TABLE %[1]s;
				SELECT setval(pg_get_serial_sequence('%[3]s', 'id'), nextval(pg_get_serial_sequence('%[1]s', 'id')));
				DROP TABLE %[1]s CASCADE; ALTER TABLE %[3]s RENAME TO %[2]s`, t, b.name, fmt.Sprintf("dump%d", len(c.events))))
			if b.schema != "public" {
				c.exec(fmt.Sprintf(`ALTER TABLE public.%s SET SCHEMA %s`, b.name, b.schema))
			}
			c.guard(b.schema, b.name)
			c.walpost("outbox", "keep", t)
			c.walpost("migrate", "up")
			return true
		}},
		{name: "database restored elsewhere", do: func(c *changing) bool {
			c.leave()
			if c.other == nil {
				c.other = testenv.NewPostgres(c.t, testenv.PGOptions{Settings: map[string]string{"wal_sender_timeout": "10s", "max_replication_slots": "20"}})
			}
			name, dump := c.database(), filepath.Join(c.dir, "dump.sql")
			pgCommand(c.t, "pg_dump", "--create", "--file", dump, "--dbname", c.pg.URL(name))
			pgCommand(c.t, "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--file", dump, "--dbname", c.other.URL("postgres"))
			c.quiesced("the database is dropped", `DROP DATABASE `+name)
			to := c.other
			c.other = c.pg
			c.moveTo(to, name)
			return true
		}},
		{name: "database copied", do: func(c *changing) bool {
			c.leave()
			from, name := c.database(), c.unused(c.database())
			c.quiesced("the database is copied", fmt.Sprintf(`CREATE DATABASE %s TEMPLATE %s`, name, from))
			if c.rng.IntN(2) == 0 {
				c.quiesced("the database is dropped", `DROP DATABASE `+from)
			}
			c.moveTo(c.pg, name)
			return true
		}},
		{name: "condition changed", do: func(c *changing) bool {
			b := c.box()
			b.where = c.pick(slices.DeleteFunc(slices.Sorted(maps.Keys(conditions)), func(s string) bool { return s == b.where })...)
			c.serial++ // another publication
			return true
		}},
		{name: "outbox out or in", do: func(c *changing) bool {
			b := c.boxes[1]
			b.out = !b.out
			return true
		}},
		{name: "slot changed", do: func(c *changing) bool {
			before := c.cfg.Slot
			c.slots = (c.slots + 1 + c.rng.IntN(2)) % 3
			c.cfg.Slot = fmt.Sprintf("walpost_%d", c.slots)
			return before != c.cfg.Slot
		}},
		{name: "slot dropped", do: func(c *changing) bool {
			if c.count(`SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1`, c.cfg.Slot) == 0 {
				return false
			}
			c.slotsAreIdle()
			c.walpost("slot", "drop")
			return true
		}},
		{name: "initial changed", do: func(c *changing) bool {
			c.initial = c.pick(c.initials()...)
			return true
		}},
		{name: "stream changed", drained: true, do: func(c *changing) bool {
			c.streamN = map[string]string{"E1": "E2", "E2": "E1"}[c.streamN]
			return true
		}},
		{name: "source changed", drained: true, do: func(c *changing) bool {
			c.source = c.pick("one", "two", "three")
			return true
		}},
		{name: "mode changed", do: func(c *changing) bool {
			c.mode = map[string]string{"auto": "poll", "poll": "auto"}[c.mode]
			return true
		}},
		{name: "outbox set aside", asItRuns: true, do: (*changing).misfit},
		{name: "relay beside it", drained: true, do: (*changing).besideIt},
		{name: "relay frozen", do: (*changing).frozen},
	}
}

// box is one that is configured.
func (c *changing) box() *changingBox {
	if b := c.boxes[c.rng.IntN(len(c.boxes))]; !b.out {
		return b
	}
	return c.boxes[0]
}

// unused is a name that nothing had before.
func (c *changing) unused(name string) string {
	base, _, _ := strings.Cut(name, "_v")
	return fmt.Sprintf("%s_v%d", base, len(c.events))
}

// setAside takes the name from an outbox's table.
func (c *changing) setAside(b *changingBox) {
	c.t.Helper()
	c.aside++
	aside := fmt.Sprintf("before%d", c.aside)
	c.exec(`ALTER TABLE ` + b.now.sql() + ` RENAME TO ` + aside)
	b.now.name = aside
	b.before = append(b.before, b.now)
}

// swapBack gives the outbox's name to a table that had it before.
func (c *changing) swapBack(b *changingBox, i int) {
	c.t.Helper()
	back := b.before[i]
	b.before = slices.Delete(b.before, i, i+1)
	c.setAside(b)
	c.exec(`ALTER TABLE ` + back.sql() + ` RENAME TO ` + b.name)
	if back.name = b.name; back.schema != b.schema {
		c.exec(`ALTER TABLE ` + back.sql() + ` SET SCHEMA ` + b.schema)
		back.schema = b.schema
	}
	b.now = back
	c.walpost("migrate", "up")
}

func (c *changing) database() string { return c.query1(`SELECT current_database()::text`) }

// leave is what comes before a relay leaves a database: the source stays, and no slot keeps WAL there.
func (c *changing) leave() {
	c.t.Helper()
	if c.source == "" {
		c.source = c.query1(`SELECT source FROM outbox_sent ORDER BY begun_at DESC LIMIT 1`)
	}
	c.slotsAreIdle()
	c.exec(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()`)
}

// slotsAreIdle waits for the server's process of a relay that was killed.
func (c *changing) slotsAreIdle() {
	c.t.Helper()
	eventually(c.t, "no slot is streamed", func() bool {
		return c.count(`SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()`) == 0
	})
}

// quiesced runs a statement that nobody may be connected for.
func (c *changing) quiesced(what, sql string) {
	c.t.Helper()
	name := c.database()
	c.disconnect()
	eventually(c.t, what, func() bool {
		c.must(c.pg.Exec(c.t.Context(), "postgres", fmt.Sprintf(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '%s'`, name)))
		return c.pg.Exec(c.t.Context(), "postgres", sql) == nil
	})
}

func (c *changing) moveTo(pg *testenv.Postgres, database string) {
	c.disconnect()
	c.pg, c.url = pg, pg.URL(database)
}

// besideIt begins a relay with another slot and stream, which waits, and goes on when the first one ends.
func (c *changing) besideIt() bool {
	c.t.Helper()
	first := c.start()
	c.streamN = map[string]string{"E1": "E2", "E2": "E1"}[c.streamN]
	c.cfg.Slot = fmt.Sprintf("walpost_beside_%d", c.slots)
	second := c.launchAs(c.command("run", "--config", c.configure())).awaitState("standby")
	c.insert()
	first.terminate()
	c.insert()
	c.relay = second
	c.settled()
	second.terminate()
	return true
}

// frozen has a relay take over from one that is frozen, and that goes on later.
func (c *changing) frozen() bool {
	c.t.Helper()
	first := c.start()
	c.insert()
	c.must(first.signal(syscall.SIGSTOP))
	c.insert()
	c.relay = c.launchAs(c.command("run", "--config", c.configure()))
	eventually(c.t, "the other relay delivers", func() bool { s := c.relay.state(); return s == "streaming" || s == "polling" })
	c.insert()
	c.settled()
	c.must(first.signal(syscall.SIGCONT))
	c.insert()
	c.settled()
	first.kill()
	c.stop(c.rng.IntN(2) == 0)
	return true
}

// misfit has a relay set an outbox aside, and puts its table in order later.
func (c *changing) misfit() bool {
	c.t.Helper()
	b := c.box()
	if c.boxes[1].out {
		return false // the relay would refuse to start without any
	}
	c.exec(`ALTER TABLE ` + b.now.sql() + ` RENAME event_version TO version`)
	b.aside = true
	runs := !c.relay.ended()
	if !runs {
		c.relay = c.start()
	}
	eventually(c.t, "the outbox is set aside", func() bool { return len(c.relay.setAside()) == 1 })
	c.insert()
	c.settled()
	if !runs {
		c.stop(c.rng.IntN(2) == 0)
	}
	c.exec(`ALTER TABLE ` + b.now.sql() + ` RENAME version TO event_version`)
	b.aside = false
	return true
}
