package relay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// prepare checks both servers and only then changes anything in either: what is
// wrong at the start is said at once, and leaves no trace. It may be called again
// where it has failed.
func (s *starter) prepare(ctx context.Context) error {
	s.one.Store(pg.NewOneServer())
	x := &checker{starter: s}
	defer x.close()
	err := x.checks().Start(ctx)
	// The stream first: only its server knows whether it can be created, while the
	// privileges for the publication have been checked.
	if err == nil && x.creates {
		err = s.createStream(ctx)
	}
	if err == nil && x.createsPublication {
		err = createPublication(ctx, s.reporter, x.db, s.cfg.Publication, x.tables)
	}
	if err != nil && s.nc != nil {
		s.disconnect(ctx)
	}
	return err
}

// disconnect ends the connection to NATS, and waits for its last callback: the next attempt has another
// connection.
func (s *starter) disconnect(ctx context.Context) {
	closed := make(chan struct{})
	s.nc.SetClosedHandler(func(*nats.Conn) { close(closed) })
	s.nc.Close()
	select {
	case <-closed:
	case <-ctx.Done(): // the server had closed it for good
	}
	s.nc = nil
}

func (s *starter) openDirect(ctx context.Context) (*table.DB, error) {
	if err := table.CheckDirect(ctx, s.database()); err != nil {
		return nil, err
	}
	return table.Open(ctx, s.database())
}

// way reports how the rows are got at a server of which err is the first problem, nil
// where it has none, and whether a start refuses it.
func (s *starter) way(err error) (streams bool, refused error) {
	streams = s.cfg.Mode != ModePoll
	if s.cfg.Mode == ModePoll && (err == nil || cannotStream(err)) {
		return streams, nil
	}
	if s.cfg.Mode == ModeAuto && cannotStream(err) {
		return false, nil
	}
	return streams, err
}

// warnAboutLimits says at the start what a table's layout and mark cannot give.
func (s *starter) warnAboutLimits(t *outbox.Table) {
	log := s.log.With(zapTable(t))
	if !table.Ordered(t) {
		log = log.With(zap.String("id_type", t.IDType))
	}
	for _, f := range limits(t) {
		if !s.limited(f.Code+" "+t.String(), time.Hour) { // a start that waits for a server comes here again
			log.Warn(f.Text)
		}
	}
}

// limits are what a table's layout and mark cannot give.
func limits(t *outbox.Table) (f check.Findings) {
	if !t.Layout.Records() {
		lacks := "columns for failures"
		for missing, has := range map[outbox.Field]outbox.Field{
			outbox.Attempts: outbox.LastError, outbox.LastError: outbox.Attempts,
		} {
			if t.Layout.Has(has) {
				lacks = missing.String()
			}
		}
		f.Warning("table-no-failure-columns",
			"map attempts and last_error in outboxes[].layout: they hold a failure together",
			"the layout has no %s: without that a poison row goes straight into the dead letters", lacks)
	}
	if !t.Layout.Dates() {
		f.Warning("table-no-time",
			"map occurred_at in outboxes[].layout to the column that has the time of an event",
			"the layout maps neither occurred_at nor available_at: outbox_lag_seconds stays 0 for it; watch "+
				"walpost_confirmed_lag_bytes")
	}
	if !table.Ordered(t) {
		f.Warning("table-ids-unordered", "", "the ids are no numbers: rows that are delivered from the "+
			"table come in no order")
	}
	switch {
	case table.MarkOf(t).Stays():
	case table.Keeps(t):
		f.Warning("table-mark-undated", "map processed_at in outboxes[].layout",
			"no column says when a row was delivered: what JetStream loses later cannot be found again in "+
				"the table")
	default:
		f.Warning("table-mark-delete", "", "mark delete: what JetStream loses later cannot be found again "+
			"in the table; have the stream on three replicas or sync always")
	}
	return f
}

// system identifies the server. Where the WAL can be read it takes the road of every
// session, because the functions that know the system identifier may be closed to the
// role. why says what keeps the WAL from being read after all.
func (s *starter) system(
	ctx context.Context, db *table.DB, streams bool,
) (sys stream.System, why, err error) {
	if streams {
		sys, err = stream.Probe(ctx, s.server(), s.cfg.Slot)
	}
	if cannotStream(err) && s.cfg.Mode == ModeAuto {
		streams, why, err = false, err, nil
	}
	if err == nil && !streams {
		sys, err = identify(ctx, db)
	}
	return sys, why, err
}

// nameSource makes the envelope, with the default source where the configuration names none. That is what it
// was when the first relay of this database began.
func (s *starter) nameSource(ctx context.Context, db *table.DB, sys stream.System) (err error) {
	s.defaultSource, err = db.DefaultSource(ctx, table.KnownPrivileges)
	if err != nil {
		return err
	}
	if s.defaultSource == "" && sys.ID != "" {
		s.defaultSource = DefaultSource(sys.ID, sys.Database)
	}
	source := cmp.Or(s.cfg.Source, s.defaultSource)
	if source == "" {
		return hint.Coded("pg-system-identifier",
			hint.Errorf("set source to a name of this database's own, or GRANT EXECUTE ON FUNCTION "+
				"pg_control_system() TO the role",
				"the role may not read the system identifier, which the default of source begins with"))
	}
	s.envelope, err = publish.NewEnvelope(publish.EnvelopeConfig{
		Source: source, Stream: s.cfg.Stream.Name, Format: s.cfg.Format,
	})
	return err
}

// identify asks the server who it is without a replication connection. The
// system's id is empty where the role may not know it: no position is compared
// then.
func identify(ctx context.Context, db *table.DB) (sys stream.System, err error) {
	sys.ID, sys.Timeline, sys.Database, err = db.Identify(ctx)
	return sys, err
}

// connect opens the connection to NATS.
func (s *starter) connect(ctx context.Context) (err error) {
	conn := s.cfg.NATS
	conn.OnError = s.onNATSError
	conn.OnDisconnect = func(err error) {
		if err != nil { // there is none where we close it ourselves
			s.log.Warn("NATS connection lost", zap.Error(err))
		}
	}
	conn.OnClosed = func(err error) {
		// The server has sent an error that the client does not know, such as after max_payload was lowered.
		if err != nil {
			s.giveUp(hint.Errorf("start the relay again; nothing is lost",
				"the NATS connection was closed for good: %w", err))
		}
	}
	conn.OnReconnect = func() { s.log.Info("NATS connection is back") }
	if s.nc, err = jetstream.Connect(ctx, conn); err != nil {
		return err
	}
	s.subjects = publish.NewSubjects(s.template)
	s.stream, err = jetstream.NewStream(s.nc, s.cfg.Stream)
	return err
}

// mayCreateStream: only where no row is marked yet. A stream that is missing
// although rows were stored is a loss that must not be papered over. An outbox that is set aside was
// delivered before.
func (x *checker) mayCreateStream(ctx context.Context, missing error) error {
	if !x.cfg.CreateStream {
		return hint.Coded("stream-missing", hint.Wrap(missing,
			"create the stream, or allow it with nats.create_stream: true"))
	}
	advice := "restore the stream, or check nats.url, nats.stream and the account; " +
		"if another relay delivered these rows, or to begin with an empty stream on purpose: " +
		x.stream.AddCommand() + " (docs/OPERATIONS.md#rows-that-another-relay-delivered)"
	slot, err := x.db.HasSlot(ctx)
	if err != nil {
		return err
	}
	for _, t := range x.cfg.Outboxes {
		marked := !slices.Contains(x.tables, t)
		if !marked {
			marked, err = x.db.HasMarks(ctx, t)
		}
		if err != nil {
			return err
		}
		if marked {
			return hint.Coded("stream-gone", hint.Wrap(fmt.Errorf("%w, but %s has rows that are marked as "+
				"stored in it", missing, t), advice))
		}
		if slot && !table.MarkOf(t).Stays() {
			// Such rows leave no mark; a slot says that a relay was here before.
			return hint.Coded("stream-gone", hint.Wrap(fmt.Errorf("%w, but slot %q exists: rows of %s may "+
				"be stored in it", missing, x.cfg.Slot, t), advice))
		}
	}
	return nil
}

func createPublication(
	ctx context.Context, p *reporter, db *table.DB, name string, tables []*outbox.Table,
) error {
	sql, err := stream.EnsurePublication(ctx, db.Conn(), name, tables)
	if err == nil && sql != "" {
		p.log.Info("created the publication", zap.String("sql", sql))
	}
	return err
}

func (s *starter) createStream(ctx context.Context) error {
	if err := s.stream.Create(ctx); err != nil {
		return err
	}
	s.log.Info("created the stream",
		zap.String("stream", s.cfg.Stream.Name), zap.String("subject", s.cfg.Stream.Pattern))
	_, findings, err := s.stream.Check(ctx)
	s.sayWeaknesses(findings) // a session asks again, and does not repeat them
	return err
}

// onNATSError gets what belongs to no call, on the connection's goroutine.
func (s *starter) onNATSError(err error) {
	subject, publishing, ok := jetstream.PermissionSubject(err)
	if ok && publishing {
		s.stream.Deny(subject)
		s.deny(subject)
	}
	s.log.Error("NATS reports an error", zap.Error(err))
}
