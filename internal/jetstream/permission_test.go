package jetstream

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// minimal are the permissions that the package's documentation tells operators to give a
// relay of stream EVENTS with inbox prefix _WALPOST.a1.
const minimal = `{
	publish { allow: [
		"events.>"
		"$JS.API.STREAM.INFO.EVENTS"
		"$JS.API.STREAM.MSG.GET.EVENTS"
		"$JS.API.CONSUMER.CREATE.EVENTS.>"
		"$JS.API.CONSUMER.MSG.NEXT.EVENTS.>"
		"$JS.API.CONSUMER.DELETE.EVENTS.>"
	] }
	subscribe { allow: [ "_WALPOST.a1.>" ] }
}`

// restricted is a server whose user relay has the given permissions, and whose
// user admin may do anything.
func restricted(tb testing.TB, permissions string) (*testenv.NATS, ConnConfig) {
	srv := testenv.NewNATS(tb, testenv.NATSOptions{Config: `authorization { users: [
		{ user: admin, password: secret }
		{ user: relay, password: secret, permissions: ` + permissions + ` }
	] }`})
	return srv, ConnConfig{URL: srv.URL(), User: "relay", PasswordFile: writeFile(tb, "password", "secret"), InboxPrefix: "_WALPOST.a1"}
}

func createAs(tb testing.TB, user string, cfg ConnConfig) {
	tb.Helper()
	cfg.User, cfg.InboxPrefix = user, ""
	s := must(NewStream(connect(tb, cfg), StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(tb)
	if err := s.Create(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

func TestMinimalPermissionsSuffice(t *testing.T) {
	_, cfg := restricted(t, minimal)
	createAs(t, "admin", cfg)
	var sig signals
	sig.set(&cfg)
	nc := connect(t, cfg)
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	if _, _, err := s.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	js := testenv.JetStream(t, nc)
	for i := range 10 {
		must(js.PublishMsg(t.Context(), &nats.Msg{Subject: "events.order.placed", Header: nats.Header{
			nats.MsgIdHdr: {fmt.Sprintf("7300/shop/public.outbox_messages/%d/%016x", i, i+1)}, PositionHeader: {"7300/1/1/10/1/0/20"},
			nats.ExpectedStreamHdr: {"EVENTS"}, nats.ExpectedLastSeqHdr: {strconv.Itoa(i)},
		}}))(t)
	}
	info, doubt, err := s.Fence(t.Context(), true, 0)
	if err := errors.Join(doubt, err); err != nil {
		t.Fatal(err)
	}
	must(s.Message(t.Context(), info.LastSeq))(t)
	n := 0
	must(s.ScanBackward(t.Context(), info.FirstSeq, info.LastSeq, ScanOptions{
		Source: "7300/shop", Step: func(m []Message) (bool, error) { n += len(m); return true, nil },
	}))(t)
	if n != 10 {
		t.Errorf("%d messages read back, want 10", n)
	}
	must(0, nc.Flush())(t)
	select {
	case err := <-sig.errs:
		t.Errorf("permission error: %v", err)
	default:
	}
}

// TestMinimalPermissionsToCreate adds the one that creating the stream takes.
func TestMinimalPermissionsToCreate(t *testing.T) {
	_, cfg := restricted(t, strings.Replace(minimal, `"events.>"`, `"events.>", "$JS.API.STREAM.CREATE.EVENTS"`, 1))
	s := must(NewStream(connect(t, cfg), StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	if err := s.Create(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMinimalPermissionsAreDocumented(t *testing.T) {
	doc := string(must(os.ReadFile("doc.go"))(t))
	for _, quoted := range regexp.MustCompile(`"[^"]+"|_RELAY[^ ]+`).FindAllString(minimal, -1) {
		if subject := strings.Trim(quoted, `"`); !strings.Contains(doc, subject) {
			t.Errorf("doc.go does not name %s", subject)
		}
	}
}

func TestPermissionErrorsNameTheSubject(t *testing.T) {
	_, cfg := restricted(t, `{ publish { allow: [ "events.>" ], deny: [ "events.secret.>" ] }, subscribe { allow: [ "_WALPOST.a1.>" ] } }`)
	createAs(t, "admin", cfg)
	var sig signals
	sig.set(&cfg)
	nc := connect(t, cfg)
	for subject, publish := range map[string]bool{"events.secret.a": true, `events.secret."q"\`: true, "orders.>": false, "$JS.API.INFO": true} {
		if publish {
			must(0, nc.PublishRequest(subject, nc.NewInbox(), nil))(t)
		} else {
			must(nc.SubscribeSync(subject))(t)
		}
		err := receive(t, sig.errs, "permission error")
		if got, p, ok := PermissionSubject(err); !ok || got != subject || p != publish {
			t.Errorf("%v reads %q, %v, %v; want %q, %v", err, got, p, ok, subject, publish)
		}
	}
	if nc.Status() != nats.CONNECTED {
		t.Errorf("the connection is %s", nc.Status())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t).Info(ctx)
	if wantError(t, err, "read stream EVENTS", "permissions violation"); !strings.Contains(hint.Of(err), "$JS.API.STREAM.INFO.EVENTS") {
		t.Errorf("hint %s", hint.Of(err))
	}
}

func TestPermissionSubjectOfOtherErrors(t *testing.T) {
	violation := func(s string) error { return fmt.Errorf("%w: %s", nats.ErrPermissionViolation, s) }
	for _, err := range []error{
		nil, nats.ErrTimeout, fmt.Errorf(`Permissions Violation for Publish to "a"`), violation(""), violation("Permissions Violation for Publish to"),
		violation(`Permissions Violation for Publish to "a`), violation(`Permissions Violation for Publish to a`),
	} {
		if s, _, ok := PermissionSubject(err); ok {
			t.Errorf("%v reads %q", err, s)
		}
	}
	for text, publish := range map[string]bool{
		`Permissions Violation for Publish to "a.b"`:                        true,
		`Permissions Violation for Publish with Reply of "a.b"`:             false,
		`Permissions Violation for Subscription to "a.b" using queue "q"`:   false,
		`Permissions Violation for Subscription to "a.b", too many tokens`:  false,
		`Permissions Violation for Subscription to "a.b" (sid "1")`:         false,
		`Permissions Violation for Publish to "a.b" and what may come next`: true,
	} {
		if s, p, ok := PermissionSubject(violation(text)); s != "a.b" || p != publish || !ok {
			t.Errorf("%s reads %q, %v, %v", text, s, p, ok)
		}
	}
}

// TestConnectCreds runs a server in operator mode, where users bring a JWT.
func TestConnectCreds(t *testing.T) {
	operator, account, user := must(nkeys.CreateOperator())(t), must(nkeys.CreateAccount())(t), must(nkeys.CreateUser())(t)
	system := must(nkeys.CreateAccount())(t) // JetStream wants one in this mode
	public := func(kp nkeys.KeyPair) string { return must(kp.PublicKey())(t) }
	operatorJWT := must(jwt.NewOperatorClaims(public(operator)).Encode(operator))(t)
	accountJWT := func(kp nkeys.KeyPair) string { return must(jwt.NewAccountClaims(public(kp)).Encode(operator))(t) }
	creds := func(signer nkeys.KeyPair, expires time.Time) string {
		claims := jwt.NewUserClaims(public(user))
		claims.Expires = expires.Unix()
		token := must(claims.Encode(signer))(t)
		return string(must(jwt.FormatUserConfig(token, must(user.Seed())(t)))(t))
	}
	srv := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(
		"operator: %q\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: { %s: %q, %s: %q }\n", operatorJWT,
		public(system), public(system), accountJWT(system), public(account), accountJWT(account))})
	later := time.Now().Add(time.Hour)
	connect(t, ConnConfig{URL: srv.URL(), Creds: writeFile(t, "relay.creds", creds(account, later))})

	stranger := must(nkeys.CreateAccount())(t)
	for name, text := range map[string]string{
		"of another account": creds(stranger, later), "expired": creds(account, time.Now().Add(-time.Hour)),
	} {
		_, err := Connect(t.Context(), ConnConfig{URL: srv.URL(), Creds: writeFile(t, "other.creds", text)})
		wantError(t, err, "connect to NATS")
		if text := err.Error() + hint.Of(err); strings.Contains(text, string(must(user.Seed())(t))) || !strings.Contains(text, "nats.creds") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// TestAccountsConsumers: the limit of the account is named, as that of the stream is.
func TestAccountsConsumers(t *testing.T) {
	srv := testenv.NewNATS(t, testenv.NATSOptions{Config: `accounts { A { jetstream { max_consumers: 2 }, users: [{user: a, password: a}] } }
		no_auth_user: a`})
	nc := connect(t, ConnConfig{URL: srv.URL()})
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	for n := range 3 {
		info := must(s.Info(t.Context()))(t)
		named := false
		for _, f := range s.Examine(t.Context(), info) {
			named = named || f.Code == "nats-max-consumers"
		}
		if named != (n == 2) {
			t.Errorf("with %d of 2 consumers the limit is named: %t", n, named)
		}
		_, err := s.js.CreateConsumer(t.Context(), "EVENTS", jetstream.ConsumerConfig{Durable: fmt.Sprintf("c%d", n)})
		if (err != nil) != (n == 2) {
			t.Errorf("consumer %d: %v", n+1, err)
		}
	}
}
