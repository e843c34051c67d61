package main

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func newStatusCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "status", Short: "Show what runs now: relay, slot, backlog, dead letters, stream",
		Long: help("status"), Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			tables, err := cfg.Tables()
			if err != nil {
				return err
			}
			r := &statusReport{
				At: time.Now().UTC(), CountLimit: countMost,
				Outboxes: []*outboxStatus{}, Unread: []unread{}, Errors: []unasked{},
			}
			errs := problems{}
			for _, server := range []struct {
				name string
				ask  func() error
			}{
				{"postgres", func() error { return r.askPostgres(cmd.Context(), cfg, tables) }},
				{"nats", func() error { return r.askNATS(cmd.Context(), cfg) }},
			} {
				if err := server.ask(); err != nil {
					errs = append(errs, err)
					r.Errors = append(r.Errors, unasked{server.name, oneLine(err.Error()), hint.Of(err)})
				}
			}
			return apart(printStatus(cmd.OutOrStdout(), r, cfg, asJSON), apart(errs...))
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	addConfigFlags(cmd)
	return cmd
}

// statusReport is what --json prints; see help/status.txt. nil is not known.
type statusReport struct {
	At          time.Time       `json:"at"`
	Server      *pg.Server      `json:"server"`
	Relay       *relayStatus    `json:"relay"`
	Slot        *slotStatus     `json:"slot"`
	NewSlot     *slotStatus     `json:"new_slot"`
	CountLimit  int             `json:"count_limit"`
	Outboxes    []*outboxStatus `json:"outboxes"`
	DeadLetters *int            `json:"dead_letters"`
	Replay      *table.Replay   `json:"replay"`
	Stream      *streamStatus   `json:"stream"`
	Unread      []unread        `json:"unread"`
	Errors      []unasked       `json:"errors"`
}

type relayStatus struct {
	Mode       string      `json:"mode"`
	Lock       *pg.Session `json:"lock"`
	StandingBy *int        `json:"standing_by"`
}

type slotStatus struct {
	Name   string `json:"name"`
	Exists bool   `json:"exists"`
	*pg.SlotState
	Walsender *pg.Session `json:"walsender"`
}

// streamed reports whether something reads the slot. One that is being created is in use, too, and has
// confirmed nothing yet.
func (s *slotStatus) streamed() bool { return s.Exists && s.ActivePID != nil && s.Confirmed != "" }

type outboxStatus struct {
	Table        string      `json:"table"`
	Mark         outbox.Mark `json:"mark"`
	Pending      *int        `json:"pending"`
	OldestDueAge *float64    `json:"oldest_due_age_seconds"`
	Parked       *int        `json:"parked"`
	Held         *int        `json:"held"`
	// Progress is that of the journal, nil with other marks.
	Progress      *table.Progress `json:"progress,omitempty"`
	dates, record bool            // the layout's
}

type streamStatus struct {
	Name   string `json:"name"`
	Exists bool   `json:"exists"`
	*StreamFacts
}

// StreamFacts are those of a stream that exists.
type StreamFacts struct {
	Messages        uint64     `json:"messages"`
	Bytes           uint64     `json:"bytes"`
	FirstSeq        uint64     `json:"first_sequence"`
	LastSeq         uint64     `json:"last_sequence"`
	LastMessage     *time.Time `json:"last_message_at"`
	Created         time.Time  `json:"created_at"`
	Replicas        int        `json:"replicas"`
	Leader          *string    `json:"leader"`
	DuplicateWindow float64    `json:"duplicate_window_seconds"`
	Batches         []string   `json:"batches"`
}

// unread is a part of the report that could not be read.
type unread struct {
	Part  string `json:"part"`
	Error string `json:"error"`
	Hint  string `json:"hint"`
}

// unasked is a server that could not be asked.
type unasked struct {
	Server string `json:"server"`
	Error  string `json:"error"`
	Hint   string `json:"hint"`
}

// look leaves a part out that cannot be read.
func (r *statusReport) look(part string, err error) bool {
	if err != nil {
		r.Unread = append(r.Unread, unread{part, oneLine(err.Error()), hint.Of(err)})
	}
	return err == nil
}

// lookFor is how long one question to PostgreSQL may take.
const lookFor = 2 * time.Second

// database is how a command reaches PostgreSQL, under the name that the server shows.
func database(cfg *Config, name string) table.Config {
	settings := maps.Clone(stream.Settings)
	settings["application_name"] = name
	schema, _, _ := outbox.ParseTable(cfg.Outboxes[0].Table) // it was checked when it was read
	return table.Config{
		URL: cfg.Postgres.URL, Files: cfg.Postgres.files(), Settings: settings,
		Dial: stream.Dialer().DialContext, Slot: cfg.Postgres.Slot, Schema: schema,
	}
}

// openLook connects a command that looks at a relay's work from outside.
func openLook(ctx context.Context, cfg *Config, name string) (*table.DB, error) {
	config := database(cfg, name)
	if err := table.CheckDirect(ctx, config); err != nil {
		return nil, err
	}
	db, err := table.Open(ctx, config)
	if err != nil {
		return nil, err
	}
	if err := db.Unbind(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

func (r *statusReport) askPostgres(ctx context.Context, cfg *Config, tables []*outbox.Table) error {
	db, err := openLook(ctx, cfg, "walpost status")
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Limit(ctx, lookFor); err != nil {
		return err
	}
	server, err := db.Server(ctx)
	if err != nil {
		return err
	}
	r.Server = &server
	r.askSlots(ctx, db, cfg.Postgres.Slot)
	r.askRelay(ctx, db)
	for _, t := range tables {
		r.askOutbox(ctx, db, t)
	}
	if n, err := db.DeadLetterCount(ctx, countMost); r.look("dead_letters", db.ExplainRead(ctx, nil, err)) {
		r.DeadLetters = &n
	}
	replay, err := db.NextReplay(ctx, cfg.Postgres.Slot)
	if r.look("replay", err) {
		r.Replay = replay
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !db.Alive() {
		return errors.New("the connection to PostgreSQL was lost: the report is incomplete")
	}
	return nil
}

func (r *statusReport) askSlots(ctx context.Context, db *table.DB, name string) {
	slot, fresh, err := readSlots(ctx, db, name)
	if r.look("slot", err) {
		r.Slot, r.NewSlot = slot, fresh
	}
}

// readSlots reads the relay's slot, and the one that is being made, which may be nil.
func readSlots(ctx context.Context, db *table.DB, name string) (slot, fresh *slotStatus, err error) {
	if slot, err = readSlot(ctx, db, name); err != nil {
		return nil, nil, err
	}
	fresh, err = readSlot(ctx, db, stream.NewSlotName(name))
	if err != nil || !fresh.Exists || !fresh.Temporary {
		fresh = nil
	}
	return slot, fresh, err
}

func readSlot(ctx context.Context, db *table.DB, name string) (*slotStatus, error) {
	state, err := db.ReadSlot(ctx, name)
	s := &slotStatus{Name: name, Exists: state != nil, SlotState: state}
	if err == nil && state != nil && state.ActivePID != nil {
		s.Walsender, err = db.ReadSession(ctx, *state.ActivePID)
	}
	return s, err
}

func (r *statusReport) askRelay(ctx context.Context, db *table.DB) {
	holder, err := db.LockHolder(ctx)
	if !r.look("relay", err) {
		return
	}
	r.Relay = &relayStatus{Mode: "none", Lock: holder}
	if holder != nil {
		r.Relay.Mode = "poll"
		if r.Slot != nil && r.Slot.streamed() {
			r.Relay.Mode = "stream"
		}
	}
	waiting, known, err := db.StandingBy(ctx, holder)
	if err == nil && known {
		r.Relay.StandingBy = &waiting
	}
	if err == nil && (!known || holder != nil && holder.Hidden()) {
		err = hint.Errorf("GRANT pg_read_all_stats TO "+outbox.QuoteIdent(db.User()),
			"the role may not see what others' sessions do: whose client a relay is, and who stands by")
	}
	r.look("relay.standing_by", err)
}

func (r *statusReport) askOutbox(ctx context.Context, db *table.DB, t *outbox.Table) {
	s := &outboxStatus{Table: t.String(), Mark: t.Mark, dates: t.Layout.Dates(), record: t.Layout.Records()}
	r.Outboxes = append(r.Outboxes, s)
	if !table.MarkOf(t).InTable() {
		return
	}
	if !r.look("outboxes.where", db.ExplainRead(ctx, t, db.Complete(ctx, t))) {
		return
	}
	for _, q := range []struct {
		part string
		ask  func() error
	}{
		{"outboxes.pending", func() error {
			n, err := db.PendingCount(ctx, t, countMost)
			if err == nil {
				s.Pending = &n
			}
			return err
		}},
		{"outboxes.oldest_due_age_seconds", func() error {
			age, err := db.OldestPending(ctx, t)
			if seconds := age.Seconds(); err == nil && s.dates {
				s.OldestDueAge = &seconds
			}
			return err
		}},
		{"outboxes.parked", func() error {
			if !s.record {
				return nil
			}
			parked, held, err := db.RecordedCount(ctx, t, countMost)
			if err == nil {
				s.Parked, s.Held = &parked, &held
			}
			return err
		}},
		{"outboxes.progress", func() error {
			if !table.Journals(t) {
				return nil
			}
			p, err := db.Progress(ctx, t)
			if err == nil {
				s.Progress = &p
			}
			return err
		}},
	} {
		err := q.ask()
		if !r.look(q.part, db.ExplainRead(ctx, t, err)) && pg.Code(err) != pgerrcode.QueryCanceled {
			return // it would be the same for the others; only one may be quicker than another
		}
	}
}

func (r *statusReport) askNATS(ctx context.Context, cfg *Config) error {
	conn := natsConn(&cfg.NATS)
	conn.Name = "walpost status"
	nc, err := jetstream.Connect(ctx, conn)
	if err != nil {
		return err
	}
	defer nc.Close()
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain})
	if err != nil {
		return err
	}
	info, err := s.Info(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		r.Stream = &streamStatus{Name: cfg.NATS.Stream}
		return nil
	}
	if err != nil {
		return err
	}
	r.Stream = &streamStatus{Name: cfg.NATS.Stream, Exists: true, StreamFacts: factsOf(info)}
	return nil
}

func factsOf(info *jetstream.StreamInfo) *StreamFacts {
	f := &StreamFacts{
		Messages: info.Messages, Bytes: info.Bytes, FirstSeq: info.FirstSeq, LastSeq: info.LastSeq,
		Created: info.Created.UTC(), Replicas: info.Config.Replicas,
		DuplicateWindow: info.Config.Duplicates.Seconds(), Batches: []string{},
	}
	// A purge of everything leaves no time.
	if last := info.LastTime.UTC(); info.LastSeq > 0 && last.Year() > 1970 {
		f.LastMessage = &last
	}
	if info.Leader != "" {
		f.Leader = &info.Leader
	}
	if info.Config.AllowBatchPublish {
		f.Batches = append(f.Batches, string(jetstream.BatchFast))
	}
	if info.Config.AllowAtomicPublish {
		f.Batches = append(f.Batches, string(jetstream.BatchAtomic))
	}
	return f
}
