package publish

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

func TestClassify(t *testing.T) {
	for _, tt := range []struct {
		code, errCode int
		description   string
		want          Class
	}{
		{400, 10054, "message size exceeds maximum allowed", ClassRow},
		{400, 10097, "header size exceeds maximum allowed of 64k", ClassRow},
		{503, 10077, "message too large", ClassRow},
		{503, 10077, "maximum messages exceeded", ClassTransient},
		{503, 10077, "maximum bytes exceeded", ClassTransient},
		{503, 10077, "maximum messages per subject exceeded", ClassTransient},
		{400, 10071, "wrong last sequence: 3", ClassChain},
		{400, 10164, "wrong last sequence", ClassChain},
		{429, 10167, "too many requests", ClassTransient},
		{429, 10210, "atomic publish too many inflight", ClassTransient},
		{409, 10158, "duplicate message id is in process", ClassTransient},
		{503, 10023, "insufficient resources", ClassTransient},
		{400, 10002, "resource limits exceeded for account", ClassTransient},
		{503, 10008, "JetStream system temporarily unavailable", ClassTransient},
		{500, 10009, "JetStream cluster can not handle request", ClassTransient},
		{500, 10118, "stream is offline", ClassTransient},
		{500, 10194, "stream is offline: x", ClassTransient},
		{400, 10060, "expected stream does not match", ClassConfig},
		{400, 10109, "invalid operation on sealed stream", ClassConfig},
		{503, 10039, "JetStream not enabled for account", ClassConfig},
		{503, 10076, "JetStream not enabled", ClassConfig},
		{400, 10166, "per-message TTL is disabled", ClassConfig},
		{400, 19999, "of the future", ClassConfig},
		{500, 19999, "of the future", ClassTransient},
		{0, 0, "", ClassTransient},
	} {
		if got := classify(tt.code, tt.errCode, tt.description); got != tt.want {
			t.Errorf("%d %d %q is %s, want %s", tt.code, tt.errCode, tt.description, got, tt.want)
		}
	}
}

func TestClassOf(t *testing.T) {
	for err, want := range map[error]Class{
		fmt.Errorf("send: %w", &outbox.RowError{Class: outbox.RowSize}): ClassRow,
		fmt.Errorf("send: %w", &ackError{400, 10071, "x"}):              ClassChain,
		fmt.Errorf("send: %w", ErrNoResponders):                         ClassTransient,
		errInvalidAck:                                                   ClassUnknown,
		nats.ErrDisconnected:                                            ClassUnknown,
		errors.New("x"):                                                 ClassUnknown,
	} {
		if got := ClassOf(err); got != want {
			t.Errorf("%v is %s, want %s", err, got, want)
		}
	}
	if (&ackError{400, 10071, "x"}).Row() != nil || (&ackError{400, 10054, "x"}).Row().Class != outbox.RowSize ||
		(&ackError{400, 10097, "x"}).Row().Class != outbox.RowHeaders {
		t.Error("Row")
	}
}

// TestServerErrors provokes on a real server what the classes are made for.
func TestServerErrors(t *testing.T) {
	nc, _ := newStream(t, testenv.NATSOptions{MaxPayload: 40 << 20}, nil)
	js := testenv.JetStream(t, nc)
	make := func(name string, edit func(*natsjs.StreamConfig)) {
		cfg := natsjs.StreamConfig{Name: name, Subjects: []string{name}}
		edit(&cfg)
		must(js.CreateStream(t.Context(), cfg))(t)
	}
	make("SMALL", func(c *natsjs.StreamConfig) { c.MaxMsgSize = 100 })
	make("FULL", func(c *natsjs.StreamConfig) { c.MaxMsgs, c.Discard = 1, natsjs.DiscardNew })
	make("SEALED", func(*natsjs.StreamConfig) {})
	must(js.UpdateStream(t.Context(), natsjs.StreamConfig{Name: "SEALED", Subjects: []string{"SEALED"}, Sealed: true}))(t)
	must(js.Publish(t.Context(), "FULL", nil))(t)

	for _, tt := range []struct {
		subject, header, value string
		size, errCode          int
		class                  Class
	}{
		{"events.x", nats.ExpectedStreamHdr, "OTHER", 1, 10060, ClassConfig},
		{"events.x", nats.ExpectedLastSeqHdr, "7", 1, 10071, ClassChain},
		{"events.x", "Long", strings.Repeat("x", 65_536), 1, 10097, ClassRow},
		{"events.x", "A", "b", 33 << 20, 10077, ClassRow},
		{"events.x", nats.MsgTTLHdr, "1s", 1, 10166, ClassConfig},
		{"SMALL", "A", "b", 100, 10054, ClassRow},
		{"FULL", "A", "b", 1, 10077, ClassTransient},
		{"SEALED", "A", "b", 1, 10109, ClassConfig},
	} {
		msg := &nats.Msg{Subject: tt.subject, Header: nats.Header{tt.header: {tt.value}}, Data: []byte(strings.Repeat("x", tt.size))}
		_, err := parseAck(must(nc.RequestMsg(msg, 30*time.Second))(t), "EVENTS")
		var refused *ackError
		if !errors.As(err, &refused) || refused.ErrCode != tt.errCode || refused.Class() != tt.class {
			t.Errorf("%s with %s: %v is %s, want %d of class %s", tt.subject, tt.header, err, ClassOf(err), tt.errCode, tt.class)
		}
	}
}

func TestNobodyAndSomebodyElseAnswers(t *testing.T) {
	nc, _ := newStream(t, testenv.NATSOptions{}, nil)
	// A raw inbox, as the publisher's: nats.go's own calls turn the status into an error.
	inbox, replies := nc.NewInbox(), make(chan *nats.Msg, 1)
	must(nc.ChanSubscribe(inbox, replies))(t)
	must(nc.Subscribe("foreign", func(m *nats.Msg) { _ = m.Respond([]byte("hello")) }))(t)
	for subject, want := range map[string]error{"nobody": ErrNoResponders, "foreign": errInvalidAck} {
		if err := nc.PublishRequest(subject, inbox, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := parseAck(receive(t, replies, "reply"), "EVENTS"); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", subject, err, want)
		}
	}
}

func TestAckOfADomain(t *testing.T) {
	nc := connect(t, jetstream.ConnConfig{URL: testenv.NewNATS(t, testenv.NATSOptions{JetStream: "domain: hub"}).URL()})
	js := must(natsjs.NewWithDomain(nc, "hub"))(t)
	must(js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}))(t)
	reply := must(nc.Request("events.x", nil, 5*time.Second))(t)
	if ack, err := parseAck(reply, "EVENTS"); err != nil || ack.Seq != 1 || !strings.Contains(string(reply.Data), "hub") {
		t.Errorf("ack %s in a domain: %+v, %v", reply.Data, ack, err)
	}
}
