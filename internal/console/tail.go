package console

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/publish"
)

const (
	// mostTails is how many viewers may follow the stream at once: each has a consumer.
	mostTails = 4
	// tailRate is how many events a second are shown, and tailAhead how many are asked for at once.
	tailRate  = 200
	tailAhead = 20
	// tailPayload bounds, in bytes, a payload that is shown.
	tailPayload = 4 << 10
	// tailPing is the time between two signs of life, and tailPatience how long a viewer may read nothing.
	tailPing     = 10 * time.Second
	tailPatience = 20 * time.Second
	// tailIdle without an event means that the viewer has seen everything.
	tailIdle  = 250 * time.Millisecond
	mostTypes = 20
)

type tailEvent struct {
	Sequence  uint64    `json:"sequence"`
	At        time.Time `json:"at"`
	Subject   string    `json:"subject"`
	Type      string    `json:"type"`
	Aggregate string    `json:"aggregate"` // type/id
	Tenant    string    `json:"tenant_id"`
	ID        string    `json:"id"`
	Replay    bool      `json:"replay"`
	Relayed   bool      `json:"relayed"` // false: another writer's
	Bytes     int       `json:"bytes"`
	Payload   *string   `json:"payload"`
	// Base64 is the payload where it is no UTF-8.
	Base64 []byte `json:"payload_base64,omitempty"`
	Cut    bool   `json:"payload_cut"`
}

func eventOf(m jetstream.Received, payload bool) tailEvent {
	e := tailEvent{
		Sequence: m.Seq, At: m.At.UTC(), Subject: m.Subject, Type: m.Type, ID: m.ID, Tenant: m.TenantID,
		Replay: m.Row.Replay, Relayed: m.Relayed, Bytes: len(m.Payload),
	}
	if m.AggregateType != "" || m.AggregateID != "" {
		e.Aggregate = m.AggregateType + "/" + m.AggregateID
	}
	if !payload {
		return e
	}
	shown := whole(m.Payload, tailPayload)
	if e.Cut = len(shown) < len(m.Payload); utf8.Valid(shown) {
		text := string(shown)
		e.Payload = &text
	} else {
		e.Base64 = shown
	}
	return e
}

// tail follows the stream's end until the viewer leaves. It is not ahead of the viewer: the stream keeps what
// was not read yet, and what is too much is passed over.
func (c *Console) tail(w http.ResponseWriter, r *http.Request) {
	types, err := publish.ParseTypes(r.URL.Query()["type"])
	switch {
	case err != nil:
		err = &refusal{http.StatusBadRequest, err}
	case len(types) > mostTypes:
		err = badRequest("name fewer, or use a wildcard as in order.*",
			"%d event types are too many", len(types))
	}
	if err != nil {
		answer(w, nil, err)
		return
	}
	select {
	case c.tails <- struct{}{}:
		defer func() { <-c.tails }()
	default:
		answer(w, nil, refuse(http.StatusServiceUnavailable, "close another one, or use `walpost tail`",
			"%d viewers follow the stream already", mostTails))
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-c.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	c.follow(ctx, w, types)
}

// follow has a connection to NATS of its own.
func (c *Console) follow(ctx context.Context, w http.ResponseWriter, types publish.Types) {
	f, done, err := c.newFollower(ctx, types)
	if err != nil {
		answer(w, nil, err)
		return
	}
	defer done()
	w.Header().Set("Content-Type", "application/x-ndjson")
	f.out = newTailWriter(w)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var pinging sync.WaitGroup
	pinging.Go(func() { cancel(f.out.ping(ctx)) })
	defer pinging.Wait()
	defer cancel(nil)
	if err := f.stream.ExplainFollow(f.run(ctx)); err != nil && ctx.Err() == nil {
		// The status has been sent: the error is a line.
		_ = f.out.write(map[string]string{
			"error": hint.OneLine(err.Error()), "hint": hint.OneLine(hint.Of(err)),
		})
	}
}

// follower shows events to one viewer.
type follower struct {
	stream *jetstream.Stream
	filter func(*jetstream.StreamInfo) []string
	types  publish.Types
	// payload: payloads are shown.
	payload bool
	out     *tailWriter

	next    uint64 // sequence
	skipped uint64
	window  time.Time // the second that is counted
	shown   int       // in it
	done    time.Time // with the last event
}

func (c *Console) newFollower(ctx context.Context, types publish.Types) (*follower, func(), error) {
	template, err := publish.NewTemplate(c.cfg.Subject)
	if err != nil {
		return nil, nil, err
	}
	nc, err := c.servers.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	f := &follower{
		types: types, payload: c.showsPayloads(),
		filter: func(info *jetstream.StreamInfo) []string { return template.Filters(&info.Config, types) },
	}
	if f.stream, err = jetstream.NewStream(nc, c.cfg.Stream); err == nil {
		var info *jetstream.StreamInfo
		if info, err = f.stream.Info(ctx); err == nil {
			f.next = info.LastSeq + 1
			return f, nc.Close, nil
		}
	}
	nc.Close()
	if f.stream != nil {
		err = f.stream.ExplainFollow(err)
	}
	return nil, nil, err
}

// errTooMany ends one time of following: what the viewer cannot read is passed over.
var errTooMany = errors.New("more events than are shown")

func (f *follower) run(ctx context.Context) error {
	for {
		info, err := f.stream.Info(ctx)
		if err != nil {
			return err
		}
		if f.skipped > 0 {
			if f.filter(info) == nil { // every message counts
				f.skipped = max(info.LastSeq+1, f.next) - f.next
			}
			f.next = info.LastSeq + 1
			if err := f.out.write(map[string]uint64{"skipped": f.skipped}); err != nil {
				return err
			}
			f.skipped = 0
		}
		err = f.stream.Follow(ctx, jetstream.FollowOptions{
			From: f.next, Filters: f.filter(info), Most: tailAhead,
			Waiting: func(err error) { f.waiting(err) },
		}, func(m jetstream.Received) error { return f.show(ctx, m) })
		if !errors.Is(err, errTooMany) {
			return err
		}
	}
}

// waiting tells why nothing comes, and null when it goes on.
func (f *follower) waiting(err error) {
	line := map[string]*string{"waiting": nil}
	if err != nil {
		if errors.Is(err, nats.ErrDisconnected) {
			err = errors.New("the connection to NATS is lost")
		}
		text := hint.OneLine(err.Error())
		line["waiting"] = &text
	}
	_ = f.out.write(line) // the next event fails alike
}

// show writes an event. A second's events are written, and then more than another second's are passed over.
func (f *follower) show(ctx context.Context, m jetstream.Received) error {
	if now := time.Now(); now.Sub(f.done) > tailIdle { // the viewer has waited for the event
		f.window, f.shown = now, 0
	}
	defer func() { f.done = time.Now() }()
	f.next = m.Seq + 1
	if len(f.types) > 0 && (!m.Relayed || !f.types.Match(m.Type)) {
		return nil
	}
	if err := f.out.write(eventOf(m, f.payload)); err != nil {
		return err
	}
	f.shown++
	left := time.Second - time.Since(f.window)
	if left > 0 && f.shown < tailRate {
		return nil
	}
	if left > 0 && !sleep.For(ctx, left) {
		return nil
	}
	f.window, f.shown = time.Now(), 0
	if m.Pending > tailRate {
		f.skipped = m.Pending
		return errTooMany
	}
	return nil
}

// tailWriter writes lines. A viewer that reads nothing for a while is given up.
type tailWriter struct {
	mu   sync.Mutex // one line at a time
	w    http.ResponseWriter
	ctrl *http.ResponseController
}

func newTailWriter(w http.ResponseWriter) *tailWriter {
	t := &tailWriter{w: w, ctrl: http.NewResponseController(w)}
	_ = t.ctrl.SetReadDeadline(time.Time{}) // the server's own would end the request
	return t
}

func (t *tailWriter) write(line any) error {
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.ctrl.SetWriteDeadline(time.Now().Add(tailPatience)); err != nil {
		return err
	}
	if _, err := t.w.Write(append(text, '\n')); err != nil {
		return err
	}
	return t.ctrl.Flush()
}

// ping shows that the connection is alive, until ctx is done or the viewer has gone.
func (t *tailWriter) ping(ctx context.Context) error {
	tick := time.NewTicker(tailPing)
	defer tick.Stop()
	for {
		if err := t.write(map[string]bool{"ping": true}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
