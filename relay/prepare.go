package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// prepare checks both servers and only then changes anything in either: what is
// wrong at the start is said at once, and leaves no trace. It may be called again
// where it has failed.
func (r *Relay) prepare(ctx context.Context) error {
	db, err := r.openDirect(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	defer context.AfterFunc(ctx, db.Cut)() // there is nothing to drain
	streams, publication, err := r.checkDatabase(ctx, db)
	if err != nil {
		return err
	}
	if err := r.identify(ctx, db, streams); err != nil {
		return err
	}
	if db.AnyBytes() {
		r.envelope.CheckText()
	}
	create, err := r.checkStream(ctx, db)
	if err == nil {
		err = r.checkInitial(ctx, db, streams, create)
	}
	// The stream first: only its server knows whether it can be created, while the
	// privileges for the publication have been checked.
	if err == nil && create {
		err = r.createStream(ctx)
	}
	if err == nil && publication {
		err = r.createPublication(ctx, db)
	}
	if err != nil && r.nc != nil {
		r.disconnect(ctx)
	}
	return err
}

// disconnect ends the connection to NATS, and waits for its last callback: the next attempt has another connection.
func (r *Relay) disconnect(ctx context.Context) {
	closed := make(chan struct{})
	r.nc.SetClosedHandler(func(*nats.Conn) { close(closed) })
	r.nc.Close()
	select {
	case <-closed:
	case <-ctx.Done(): // the server had closed it for good
	}
}

func (r *Relay) openDirect(ctx context.Context) (*fallback.DB, error) {
	if err := fallback.CheckDirect(ctx, r.cfg.database()); err != nil {
		return nil, err
	}
	return fallback.Open(ctx, r.cfg.database())
}

// checkDatabase reports whether the WAL can be read, and whether the publication is
// still to be created.
func (r *Relay) checkDatabase(ctx context.Context, db *fallback.DB) (streams, create bool, err error) {
	streams, err = r.way(stream.CheckServer(ctx, db.Conn(), r.cfg.Slot))
	if err != nil {
		return false, false, err
	}
	for _, t := range r.cfg.Outboxes {
		if err := db.CheckTable(ctx, t); err != nil {
			return false, false, err
		}
		r.warnAboutLimits(t)
	}
	if !streams {
		return false, false, nil
	}
	err = stream.CheckPublication(ctx, db.Conn(), r.cfg.Publication, r.cfg.Outboxes)
	if errors.Is(err, stream.ErrNoPublication) {
		return true, true, stream.MayCreatePublication(ctx, db.Conn(), r.cfg.Publication, r.cfg.Outboxes)
	}
	return true, false, err
}

// way reports how the rows are got at a server of which err is the first problem, nil
// where it has none, and whether a start refuses it.
func (r *Relay) way(err error) (streams bool, refused error) {
	streams = r.cfg.Mode != ModePoll
	if r.cfg.Mode == ModePoll && (err == nil || errors.Is(err, stream.ErrCannotStream)) {
		return streams, r.cfg.mayPoll(errModePoll)
	}
	if r.cfg.Mode == ModeAuto && errors.Is(err, stream.ErrCannotStream) {
		return false, r.cfg.mayPoll(err)
	}
	return streams, err
}

// warnAboutLimits says at the start what a table's layout and mark cannot give.
func (r *Relay) warnAboutLimits(t *outbox.Table) {
	log := r.log.With(zap.Stringer("table", t))
	if t.Mark != outbox.MarkNone && !counts(t.IDType) {
		log = log.With(zap.String("id_type", t.IDType))
	}
	for _, f := range limits(t) {
		if !r.limited(f.Code+" "+t.String(), time.Hour) { // a start that waits for a server comes here again
			log.Warn(f.Text)
		}
	}
}

// limits are what a table's layout and mark cannot give.
func limits(t *outbox.Table) (f hint.Findings) {
	switch {
	case t.Mark == outbox.MarkNone:
		f.Warning("table-mark-none", "", "mark none: no delayed rows, no parking, nothing to deliver from the table; a poison row goes straight into the dead letters")
	case t.Layout.Has(outbox.Attempts) || t.Layout.Has(outbox.LastError):
		if lacks := strings.Join(t.Layout.RecordLacks(), " and "); lacks != "" {
			f.Warning("table-no-failure-columns", "map that in outboxes[].layout: attempts, last_error and available_at hold a failure together",
				"the layout has no %s: without that a poison row goes straight into the dead letters", lacks)
		}
	case !t.Layout.Records():
		f.Warning("table-no-failure-columns", "", "the layout has no columns for failures: a poison row goes straight into the dead letters")
	}
	if t.Mark != outbox.MarkNone && !t.Layout.Dates() {
		f.Warning("table-no-time", "", "the layout notes no time: outbox_lag_seconds stays 0 for it; watch walpost_confirmed_lag_bytes")
	}
	if t.Mark != outbox.MarkNone && !counts(t.IDType) {
		f.Warning("table-ids-unordered", "", "the ids are no numbers: rows that are delivered from the table come in no order")
	}
	if t.Mark == outbox.MarkDelete {
		f.Warning("table-mark-delete", "", "mark delete: what JetStream loses later cannot be found again in the table; have the stream on three replicas or sync always")
	}
	return f
}

// counts reports whether ids of the type tell which row came first.
func counts(idType string) bool {
	return strings.HasPrefix(idType, "numeric") || slices.Contains([]string{"smallint", "integer", "bigint"}, idType)
}

// identify learns the default source.
func (r *Relay) identify(ctx context.Context, db *fallback.DB, streams bool) error {
	sys, _, err := r.system(ctx, db, streams)
	if err != nil {
		return err
	}
	return r.nameSource(sys)
}

// system identifies the server. Where the WAL can be read it takes the road of every
// session, because the functions that know the system identifier may be closed to the
// role. why says what keeps the WAL from being read after all.
func (r *Relay) system(ctx context.Context, db *fallback.DB, streams bool) (sys stream.System, why, err error) {
	if streams {
		sys, err = stream.Probe(ctx, r.cfg.server(), r.cfg.Slot)
	}
	if errors.Is(err, stream.ErrCannotStream) && r.cfg.Mode == ModeAuto {
		streams, why, err = false, err, r.cfg.mayPoll(err)
	}
	if err == nil && !streams {
		sys, err = identify(ctx, db)
	}
	return sys, why, err
}

// nameSource makes the envelope, with the default source where the configuration
// names none.
func (r *Relay) nameSource(sys stream.System) (err error) {
	source := r.cfg.Source
	if source == "" {
		if sys.ID == "" {
			return hint.Coded("pg-system-identifier",
				hint.Errorf("set source to a name of this database's own, or GRANT EXECUTE ON FUNCTION pg_control_system() TO the role",
					"the role may not read the system identifier, which the default of source begins with"))
		}
		source = DefaultSource(sys.ID, sys.Database)
	}
	r.envelope, err = publish.NewEnvelope(publish.EnvelopeConfig{Source: source, Stream: r.cfg.Stream.Name, Format: r.cfg.Format})
	return err
}

// identify asks the server who it is without a replication connection. The
// system's id is empty where the role may not know it: no position is compared
// then.
func identify(ctx context.Context, db *fallback.DB) (sys stream.System, err error) {
	sys.ID, sys.Timeline, sys.Database, err = db.Identify(ctx)
	return sys, err
}

// connect opens the connection to NATS.
func (r *Relay) connect(ctx context.Context) (err error) {
	conn := r.cfg.NATS
	conn.OnError = r.onNATSError
	conn.OnDisconnect = func(err error) {
		if err != nil { // there is none where we close it ourselves
			r.log.Warn("NATS connection lost", zap.Error(err))
		}
	}
	conn.OnClosed = func(err error) {
		if err != nil { // the server has answered with an error that the client does not know, such as to a lowered max_payload
			r.giveUp(hint.Errorf("start the relay again; nothing is lost", "the NATS connection was closed for good: %w", err))
		}
	}
	conn.OnReconnect = func() { r.log.Info("NATS connection is back") }
	if r.nc, err = jetstream.Connect(ctx, conn); err != nil {
		return err
	}
	r.subjects = publish.NewSubjects(r.template)
	r.stream, err = jetstream.NewStream(r.nc, r.cfg.Stream)
	return err
}

// checkStream connects to NATS and reports whether the stream is to be created.
func (r *Relay) checkStream(ctx context.Context, db *fallback.DB) (create bool, err error) {
	if err := r.connect(ctx); err != nil {
		return false, err
	}
	info, findings, err := r.stream.Check(ctx)
	r.sayWeaknesses(findings)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return true, r.mayCreateStream(ctx, db, err)
	}
	if err == nil {
		r.known.created = info.Created
	}
	return false, err
}

// mayCreateStream: only where no row is marked yet. A stream that is missing
// although rows were stored is a loss that must not be papered over.
func (r *Relay) mayCreateStream(ctx context.Context, db *fallback.DB, missing error) error {
	if !r.cfg.CreateStream {
		return hint.Coded("stream-missing", hint.Wrap(missing, "create the stream, or allow it with nats.create_stream: true"))
	}
	const advice = "restore the stream, or check nats.url, nats.stream and the account; to begin with an empty stream on purpose, create it yourself"
	slot, err := db.HasSlot(ctx)
	if err != nil {
		return err
	}
	for _, t := range r.cfg.Outboxes {
		marked, err := db.HasMarks(ctx, t)
		if err != nil {
			return err
		}
		if marked {
			return hint.Coded("stream-gone", hint.Wrap(fmt.Errorf("%w, but %s has rows that are marked as stored in it", missing, t), advice))
		}
		if slot && t.Mark != outbox.MarkUpdate {
			// Such rows leave no mark; a slot says that a relay was here before.
			return hint.Coded("stream-gone", hint.Wrap(fmt.Errorf("%w, but slot %q exists: rows of %s may be stored in it", missing, r.cfg.Slot, t), advice))
		}
	}
	return nil
}

func (r *Relay) createPublication(ctx context.Context, db *fallback.DB) error {
	sql, err := stream.EnsurePublication(ctx, db.Conn(), r.cfg.Publication, r.cfg.Outboxes)
	if err == nil && sql != "" {
		r.log.Info("created the publication", zap.String("sql", sql))
	}
	return err
}

func (r *Relay) createStream(ctx context.Context) error {
	if err := r.stream.Create(ctx); err != nil {
		return err
	}
	r.log.Info("created the stream", zap.String("stream", r.cfg.Stream.Name), zap.String("subject", r.cfg.Stream.Pattern))
	_, findings, err := r.stream.Check(ctx)
	for _, f := range findings {
		r.log.Warn(f.Text, zap.String("code", f.Code), zap.String("fix", f.Fix))
	}
	return err
}

// onNATSError gets what belongs to no call, on the connection's goroutine.
func (r *Relay) onNATSError(err error) {
	subject, publishing, ok := jetstream.PermissionSubject(err)
	if ok && publishing {
		r.stream.Deny(subject)
		if s := r.current.Load(); s != nil {
			s.lane.Deny(subject)
		}
	}
	r.log.Error("NATS reports an error", zap.Error(err))
}
