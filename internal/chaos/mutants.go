package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// mutant is a defect that is planted in the relay to see the rig notice it: a text
// of a source file, and what stands there instead. The product knows nothing of it.
type mutant struct {
	name  string
	edits []testenv.Edit
	// world narrows what its runs may draw, only the faults that they have.
	world func(*plan)
	only  string
	// by are the ways to notice it that count: see result.noticed.
	by []string
}

const sendOrHold = `func (h *walHandler) sendOrHold(
	ctx context.Context, ev *outbox.Event, txn fallback.Waiter, asked fallback.AsOf,
) error {
`

func streaming(p *plan)   { p.mode = "auto" }
func oneServer(p *plan)   { p.mode, p.replicas, p.standby, p.rollback = "auto", 1, false, false }
func twoRelays(p *plan)   { oneServer(p); p.relays = 2 }
func oneRelay(p *plan)    { oneServer(p); p.relays = 1 }
func onePoisoned(p *plan) { oneRelay(p); p.onPoison, p.backoff = "hold", 2*time.Second }

func journaled(world func(*plan)) func(*plan) {
	return func(p *plan) { world(p); p.mark = marks[1] }
}

var withoutPubAck = []testenv.Edit{{"publish/send.go", `	p.letLinger()
	return nil
`, `	p.letLinger()
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.ring.at(index); p.ring.holds(index) && s.state == sent {
		p.ring.replied(s, stored)
		p.stored = append(p.stored, index)
		signal(p.news)
	}
	return nil
`}}

// What the observer says.
const (
	unsettled = "is confirmed"
	unstored  = "is not in the stream"
)

var mutants = []mutant{
	{
		name: "lost: some rows are marked and never sent", world: oneServer,
		by: []string{"lost", unstored},
		edits: []testenv.Edit{{"relay/walhandler.go", sendOrHold, sendOrHold +
			`	if ev.Ref().Hash%499 == 0 {
		return h.marker.Stored(ctx, table.Row{Ref: ev.Ref(), XID: ev.XID}, 0, txn)
	}
`}},
	},
	{
		name: "duplicated: what the WAL brings again is sent again", world: oneServer, only: "relay killed",
		by: []string{"duplicated"},
		edits: []testenv.Edit{
			{
				"relay/walhandler.go",
				"		if stored {",
				"		if stored && false {",
			},
			{"relay/walhandler.go", "if !states[i].Publish() {", "if states[i].Publish() && false {"},
		},
	},
	{
		name: "swapped: some rows are sent after the next one", world: oneServer,
		by: []string{"reordered", "regressed"},
		edits: []testenv.Edit{
			{"relay/walhandler.go", sendOrHold, sendOrHold + `	switch late := h.late; {
	case h.swapping:
	case late == nil && ev.Ref().Hash%97 == 0:
		h.late = &fallback.PendingRow{Event: ev.Clone(), By: txn}
		return nil
	case late != nil:
		h.late, h.swapping = nil, true
		defer func() { h.swapping = false }()
		if err := h.sendOrHold(ctx, ev, txn, asked); err != nil {
			return err
		}
		return h.sendOrHold(ctx, late.Event, late.By, 0)
	}
`},
			{
				"relay/walhandler.go",
				"	size           int\n",
				"	size           int\n	late *fallback.PendingRow\n	swapping bool\n",
			},
		},
	},
	{
		name: "phantom: rows that no transaction has inserted", world: oneServer,
		by: []string{"unknown"},
		edits: []testenv.Edit{{"relay/walhandler.go", sendOrHold, sendOrHold +
			`	if ev.Ref().Hash%499 == 0 {
		ghost := ev.Clone()
		ghost.Values[outbox.ID] = append([]byte("9999"), ghost.Values[outbox.ID]...)
		if err := h.publisher.Send(ctx, ghost, nil); err != nil {
			return err
		}
	}
`}},
	},
	{
		name:  "confirmed too early: an LSN that was received, not settled",
		world: oneRelay, only: "NATS frozen,NATS killed,stream full",
		by: []string{unsettled},
		edits: []testenv.Edit{{
			"stream/session.go",
			"lsn := pglogrepl.LSN(s.tracker.Confirmed())",
			"s.mu.Lock()\n\tlsn := pglogrepl.LSN(s.received)\n\ts.mu.Unlock()",
		}},
	},
	{
		name:  "a position marks: what lies below the newest message's is taken for stored",
		world: onePoisoned, only: "relay killed",
		by: []string{"lost", unstored},
		edits: []testenv.Edit{{
			"relay/walhandler.go", "	// Nothing overtakes the recovery buffer",
			`	if h.recovered.tail.Covers(ev.Commit, ev.N) {
		txn.Add()
		return h.marker.Stored(ctx, table.Row{Ref: ev.Ref(), XID: ev.XID}, 0, txn)
	}
	// Nothing overtakes the recovery buffer`,
		}, {
			"relay/decide.go",
			"	if ask || h.recovered.mayHaveBeenSent(ev) || h.mayBeRecorded(ev) {",
			"	if !h.recovered.tail.Covers(ev.Commit, ev.N) && " +
				"(h.recovered.mayHaveBeenSent(ev) || h.mayBeRecorded(ev) || ask) {",
		}},
	},
	{
		name:  "marked without a PubAck: what was sent is taken for stored",
		world: oneRelay, only: "NATS killed,NATS frozen,links half open",
		by: []string{unstored}, edits: withoutPubAck,
	},
	{
		name: "the proof asks for the flushed LSN", world: streaming, only: "relay killed,links slow",
		by: []string{"missed_rows", "duplicated"},
		edits: []testenv.Edit{{
			"internal/pg/server.go",
			"SELECT pg_current_wal_insert_lsn()::text",
			"SELECT pg_current_wal_flush_lsn()::text",
		}},
	},
	{
		name:  "the tail is read before the lock and the slot are owned",
		world: twoRelays, only: "relay killed,relay stopped",
		by: []string{"events_lost", "duplicated", "stream_rolled_back"},
		edits: []testenv.Edit{
			{
				"relay/session.go",
				"	info, err := s.awaitStream(ctx, s.fence)\n" +
					"	if err != nil {\n		return err\n	}\n	s.metrics.setMode(modeStream)\n",
				"	info, err := s.past.early, error(nil)\n	s.past.early = nil\n" +
					"	if info == nil {\n		info, err = s.awaitStream(ctx, s.fence)\n	}\n" +
					"	if err != nil {\n		return err\n	}\n	s.metrics.setMode(modeStream)\n",
			},
			{
				"relay/history.go",
				"type history struct {\n",
				"type history struct {\n	early *jetstream.StreamInfo\n",
			},
			{
				"relay/leader.go",
				"func (l *leader) term(ctx context.Context) error {\n",
				"func (l *leader) term(ctx context.Context) error {\n" +
					"	l.past.early, _ = l.stream.Info(ctx)\n",
			},
		},
	},
	{
		name:  "a duplicate's PubAck is taken for stored",
		world: func(p *plan) { oneRelay(p); p.window = 5 * time.Second }, only: "message deleted",
		by: []string{"lost", unstored},
		edits: []testenv.Edit{{"publish/replies.go", `		s.ack = ack.Seq
		p.ring.replied(s, doubted)
		p.failLocked(fmt.Errorf("%w: %s, at sequence %d", ErrDoubtful, s.delivery.Ref, ack.Seq))
`, "		p.onStored(s, index, ack.Seq)\n"}},
	},
	{
		name:  "journal: an entry is written without a PubAck",
		world: journaled(oneRelay), only: "NATS killed,NATS frozen,links half open",
		by: []string{unstored}, edits: withoutPubAck,
	},
	{
		name:  "journal: the LSN behind a row is confirmed before the row is deferred",
		world: journaled(onePoisoned), only: "relay killed,sessions terminated",
		by: []string{unsettled},
		edits: []testenv.Edit{{"relay/marker.go", `	return w.add(ctx, j)
}

// Busy calls`, `	if by := j.by; by != nil {
		j.by = nil
		by.Settled()
		go func() {
			time.Sleep(700 * time.Millisecond)
			_ = w.add(ctx, j)
		}()
		return nil
	}
	return w.add(ctx, j)
}

// Busy calls`}},
	},
}

// killMutants lets the rig loose on every mutant until it is noticed, and on the
// relay as it is, which must not be.
func killMutants(ctx context.Context, o *options) error {
	next := make(chan *mutant, len(mutants)+1)
	if o.mutants == "all" {
		next <- nil
	}
	for i := range mutants {
		if m := &mutants[i]; o.mutants == "all" || strings.HasPrefix(m.name, o.mutants) {
			next <- m
		}
	}
	close(next)
	return o.side(func(mu *sync.Mutex) error {
		for m := range next {
			how, err := m.kill(ctx, o)
			if err != nil {
				return err
			}
			mu.Lock()
			fmt.Println(how)
			mu.Unlock()
		}
		return nil
	})
}

// kill tells how the mutant was noticed.
func (m *mutant) kill(ctx context.Context, o *options) (how string, err error) {
	if _, err := relayProgram(ctx, m); err != nil {
		return "", err
	}
	trial := *o
	trial.patience = time.Minute
	if m == nil {
		if r := runSeed(ctx, &trial, 1); !r.ok() {
			return "", fmt.Errorf("the relay without a defect: %s", r)
		}
		return "not noticed, and without a defect: the relay as it is", ctx.Err()
	}
	trial.mutant, trial.only = m, m.only
	for seed := range uint64(5) {
		r := runSeed(ctx, &trial, seed+1)
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if o.verbose {
			fmt.Println(r)
		}
		if slices.ContainsFunc(m.by, r.noticed) {
			return fmt.Sprintf("noticed: %s: %s", m.name, r.why()), nil
		}
	}
	return "", fmt.Errorf("SURVIVED: %s", m.name)
}
