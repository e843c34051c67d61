package relay

import (
	"context"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Examine makes every check of a start, and more, on both servers, and reports what it
// finds instead of ending at the first, errors before the rest. What a start would refuse
// has the level [check.Error], and so has what would only fail later. It changes nothing,
// takes no lock, and may run beside a relay. It is for a Relay of its own, which is not run.
//
// Questions have time limits: a PostgreSQL host 10 s for a connection and the server
// 30 s for a statement, JetStream 5 s.
func (r *Relay) Examine(ctx context.Context) check.Findings {
	x := &checker{starter: r.newStarter(func(error) {})}
	defer x.close()
	found := x.checks().All(ctx)
	if r.nc != nil {
		r.nc.Close()
	}
	return found
}

// checks are the checks of both servers, in their order. docs/OPERATIONS.md says what each code means.
func (x *checker) checks() check.List {
	list := check.List{
		check.StartAndDoctor("TLS of both connections", x.checkTLS),
		check.StartAndDoctor("connection to PostgreSQL", x.checkConnection),
		check.DoctorOnly("whether a relay is at work", x.findRelay),
		check.StartAndDoctor("server: version, encoding, wal_level, role, a free slot", x.checkServer),
		check.DoctorOnly("server: its name, slots and walsenders in use", x.describeServer),
	}
	for _, t := range x.cfg.Outboxes {
		list = append(list,
			check.StartAndDoctor("table: columns, types, privileges", x.of(t, x.checkTable)),
			check.StartAndDoctor("table: what layout and mark cannot give", x.of(t, x.checkLimits)),
			check.DoctorOnly("table: indexes, size", x.of(t, x.checkIndexes)),
			check.DoctorOnly("table: whether delivered rows leave it", x.of(t, x.checkGrowth)),
			check.DoctorOnly("table: pending rows", x.of(t, x.countPending)),
			check.DoctorOnly("table: pending rows that no search finds", x.of(t, x.findOverlooked)),
			check.DoctorOnly("table: rows that failed and wait", x.of(t, x.countParked)))
	}
	return append(list,
		check.StartAndDoctor("tables: whether one can be delivered", x.checkAny),
		check.DoctorOnly("outboxes that no relay reads", x.findUnread),
		check.DoctorOnly("dead letters", x.countDeadLetters),
		check.DoctorOnly("requests for replays", x.checkReplays),
		check.DoctorOnly("schemas of search_path that others may write to", x.checkSchemas),
		check.StartAndDoctor("publication", x.checkPublication),
		check.StartAndDoctor("replication connection, slot, system identifier", x.checkReplication),
		check.DoctorOnly("whether the tables are polled for want of a replication connection", x.checkPolled),
		check.DoctorOnly("settings, slot and publication beyond what a start needs", x.checkSettings),
		check.DoctorOnly("clocks", x.compareClocks),
		check.StartAndDoctor("connection to NATS", x.checkNATS),
		check.StartAndDoctor("stream: configuration; whether a missing one may be created", x.checkStream),
		check.DoctorOnly("stream: whether its last message is this relay's", x.checkWriter),
		check.DoctorOnly("stream: whether the server lets a missing one be created", x.checkCreatable),
		check.DoctorOnly("nats-server: version, limits, permissions", x.checkPermissions),
		check.StartAndDoctor("postgres.initial at a first start", x.checkInitialRows))
}

// checker makes the checks of one start, or of doctor. A check sets fields, and those after it read them.
// The checks log what a start says of its findings; doctor's relay has no log.
type checker struct {
	*starter

	db      *table.DB   // nil where PostgreSQL cannot be reached
	uncut   func() bool // the end of the context no longer cuts db
	answers bool        // the server has told its settings
	streams bool        // the WAL would be read
	standby bool
	held    bool            // a relay is at work; only doctor asks
	tables  []*outbox.Table // those that are as they should be
	aside   error           // why one is set aside; nil where none is
	why     error           // what refuses a replication connection, where the tables are polled instead
	named   bool            // the envelope is there

	createsPublication bool // a start creates it

	reached bool                  // NATS is connected
	asked   bool                  // the server has told of the stream, or that it is missing
	info    *jetstream.StreamInfo // nil where the stream is missing
	creates bool                  // a start creates the stream
}

func (x *checker) close() {
	if x.db != nil {
		x.uncut()
		x.db.Close()
	}
}

// of makes a check of one table.
func (x *checker) of(
	t *outbox.Table, look func(context.Context, *outbox.Table) check.Findings,
) func(context.Context) check.Findings {
	return func(ctx context.Context) check.Findings { return look(ctx, t) }
}

// whole reports whether all tables are as they should be.
func (x *checker) whole() bool { return x.db != nil && len(x.tables) == len(x.cfg.Outboxes) }
