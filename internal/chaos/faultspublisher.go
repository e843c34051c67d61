package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// anotherWriter comes only if it is asked for. A row that it has JetStream take for a duplicate is stored
// late, behind later ones of its aggregate, or becomes a dead letter. Nothing else may happen to a row.
const anotherWriter = "another writer"

// forgedHeader is in every message of another writer: the rig's readers pass over those.
const forgedHeader = "Forged"

func isForged(h nats.Header) bool { return len(h[forgedHeader]) > 0 }

// reader reads what the relays have published.
func (w *world) reader() *audit.Reader {
	return &audit.Reader{JetStream: w.js, Stream: streamName, Source: w.source, Skip: isForged}
}

// forger is another writer, who may publish and subscribe on the stream's subjects.
type forger struct {
	w   *world
	nc  *nats.Conn
	rng *rand.Rand
	old []*nats.Msg // messages of the relays, as a subscriber sees them
}

// publishAsOther publishes under the relays' ids for a while: copies of old messages, ids that no row has,
// ids of rows that the relays are about to store, ids of replays, all with other headers, and messages
// without an id, one by one or in bursts.
func publishAsOther(ctx context.Context, w *world, rng *rand.Rand) error {
	nc, err := nats.Connect(w.brokers[0].URL(), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	seen := make(chan *nats.Msg, 4096)
	sub, err := nc.ChanSubscribe("events.>", seen)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	f := &forger{w: w, nc: nc, rng: rng}
	end := time.Now().Add(between(rng, 200*time.Millisecond, 4*time.Second))
	pause := between(rng, 0, 200*time.Millisecond)
	for time.Now().Before(end) && ctx.Err() == nil {
		select {
		case m := <-seen:
			if isForged(m.Header) {
				continue
			}
			if rng.IntN(4) == 0 {
				// Before the relay's own is stored, perhaps.
				f.send("events.junk", m.Header.Get(nats.MsgIdHdr), m)
			}
			if len(f.old) < 1000 {
				f.old = append(f.old, m)
			} else {
				f.old[rng.IntN(len(f.old))] = m
			}
			continue
		default:
		}
		f.any()
		if rng.IntN(20) > 0 { // else it is a burst
			sleep.For(ctx, pause)
		}
	}
	return nc.FlushTimeout(5 * time.Second)
}

// any publishes something.
func (f *forger) any() {
	of := &nats.Msg{Subject: "events.account.moved", Header: nats.Header{}}
	if len(f.old) > 0 {
		of = f.old[f.rng.IntN(len(f.old))]
	}
	id := of.Header.Get(nats.MsgIdHdr)
	switch f.rng.IntN(4) {
	case 0:
		id = ""
	case 1:
		made := outbox.Ref{Table: outboxTable, ID: fmt.Sprint(f.rng.Int64()), Hash: 1 + f.rng.Uint64()>>1}
		id = made.MessageID(f.w.source)
	case 2:
		id = string(outbox.AppendReplay([]byte(id), 1+f.rng.Int64N(5)))
	}
	f.send(of.Subject, id, of)
}

// send publishes under an id, with any position.
func (f *forger) send(subject, id string, like *nats.Msg) {
	m := &nats.Msg{Subject: subject, Header: nats.Header{forgedHeader: {"1"}}, Data: like.Data}
	for name, values := range like.Header {
		if !strings.HasPrefix(name, "Nats-") {
			m.Header[name] = values
		}
	}
	if m.Header.Del(nats.MsgIdHdr); id != "" {
		m.Header.Set(nats.MsgIdHdr, id)
	}
	if at := strings.Split(like.Header.Get(jetstream.PositionHeader), "/"); len(at) == 7 {
		switch f.rng.IntN(4) {
		case 0:
			m.Header.Del(jetstream.PositionHeader)
		case 1:
			at = append(at[:2], "0", "1", "1", "0", "0")
		case 2:
			at = append(at[:2], "FFFF", "0", "1", "0", "0")
		}
		if m.Header.Get(jetstream.PositionHeader) != "" {
			m.Header.Set(jetstream.PositionHeader, strings.Join(at, "/"))
		}
	}
	_ = f.nc.PublishMsg(m)
}
