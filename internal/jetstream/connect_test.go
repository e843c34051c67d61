package jetstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// signals are the callbacks of a connection as channels.
type signals struct {
	disconnected, errs, closed chan error
	reconnected                chan struct{}
}

func (s *signals) set(cfg *ConnConfig) {
	s.disconnected, s.errs, s.closed = make(chan error, 16), make(chan error, 16), make(chan error, 16)
	s.reconnected = make(chan struct{}, 16)
	cfg.OnDisconnect = func(err error) { s.disconnected <- err }
	cfg.OnReconnect = func() { s.reconnected <- struct{}{} }
	cfg.OnError = func(err error) { s.errs <- err }
	cfg.OnClosed = func(err error) { s.closed <- err }
}

func receive[T any](tb testing.TB, c <-chan T, what string) T {
	tb.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(testenv.Patience):
		tb.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

func TestConnectRefusesBadConfig(t *testing.T) {
	file := writeFile(t, "junk", "junk")
	empty := writeFile(t, "empty", "\n")
	for name, tt := range map[string]struct {
		cfg  ConnConfig
		want string
	}{
		"no url":           {ConnConfig{}, "entry 1 is empty"},
		"empty entry":      {ConnConfig{URL: "nats://localhost,"}, "entry 2 is empty"},
		"scheme":           {ConnConfig{URL: "http://u:s3cret@localhost:4222"}, "does not begin with nats://"},
		"no host":          {ConnConfig{URL: "nats://:4222"}, "names no host"},
		"port":             {ConnConfig{URL: "nats://localhost:port"}, "not a URL"},
		"secret in error":  {ConnConfig{URL: "nats://u:s3cret%zz@localhost"}, "not a URL"},
		"two ways":         {ConnConfig{URL: "nats://localhost", User: "u", PasswordFile: file, Creds: file}, "more than one"},
		"user only":        {ConnConfig{URL: "nats://localhost", User: "u"}, "come together"},
		"password only":    {ConnConfig{URL: "nats://localhost", PasswordFile: file}, "come together"},
		"no creds file":    {ConnConfig{URL: "nats://localhost", Creds: "/nowhere/x.creds"}, "nats.creds: open /nowhere/x.creds"},
		"empty creds file": {ConnConfig{URL: "nats://localhost", Creds: empty}, "holds no credentials"},
		"no nkey file":     {ConnConfig{URL: "nats://localhost", NKey: "/nowhere/x.nk"}, "nats.nkey: open"},
		"junk nkey":        {ConnConfig{URL: "nats://localhost", NKey: file}, "no user seed"},
		"no password file": {ConnConfig{URL: "nats://localhost", User: "u", PasswordFile: "/nowhere"}, "nats.password_file"},
		"empty password":   {ConnConfig{URL: "nats://localhost", User: "u", PasswordFile: empty}, "is empty"},
		"cert only":        {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{Cert: file}}, "come together"},
		"no cert":          {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{Cert: "/nowhere", Key: file}}, "nats.tls.cert: open"},
		"no key":           {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{Cert: file, Key: "/nowhere"}}, "nats.tls.key: open"},
		"junk cert":        {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{Cert: file, Key: file}}, "load cert and key"},
		"no ca":            {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{CA: "/nowhere"}}, "nats.tls.ca: open"},
		"junk ca":          {ConnConfig{URL: "nats://localhost", TLS: TLSConfig{CA: file}}, "no certificate"},
		"inbox prefix":     {ConnConfig{URL: "nats://localhost", InboxPrefix: "a.>"}, "invalid custom prefix"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Connect(t.Context(), tt.cfg)
			wantError(t, err, tt.want)
			if checked := tt.cfg.CheckFiles(); checked != nil && checked.Error() != err.Error() {
				t.Errorf("the check of its files says %v, and Connect %v", checked, err)
			}
			if text := fmt.Sprint(err) + hint.Of(err); strings.Contains(text, "s3cret") {
				t.Errorf("the error tells the secret: %s", text)
			}
		})
	}
}

func TestConnectNobodyThere(t *testing.T) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	address := l.Addr().String()
	l.Close()
	start := time.Now()
	_, err := Connect(t.Context(), ConnConfig{URL: "nats://u:s3cret@" + address + "," + address})
	wantError(t, err, "connect to NATS at nats://"+address)
	if !strings.Contains(hint.Of(err), "nothing listens") || strings.Contains(err.Error()+hint.Of(err), "s3cret") {
		t.Errorf("%v (hint: %s)", err, hint.Of(err))
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("it took %s", d)
	}
	_, err = Connect(t.Context(), ConnConfig{URL: "nats://no-such-host.invalid:4222"})
	wantError(t, err, "no-such-host.invalid")
}

// TestConnectMute meets a listener that accepts and says nothing: the timeout
// and the context both end the attempt.
func TestConnectMute(t *testing.T) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	_, err := Connect(t.Context(), ConnConfig{URL: l.Addr().String(), Timeout: 50 * time.Millisecond})
	wantError(t, err, "connect to NATS")

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := Connect(ctx, ConnConfig{URL: l.Addr().String(), Timeout: time.Hour})
		done <- err
	}()
	conn := must(l.Accept())(t) // the first attempt's
	defer conn.Close()
	cancel()
	if err := receive(t, done, "end of Connect"); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func TestConnectUserAndPassword(t *testing.T) {
	srv := testenv.NewNATS(t, testenv.NATSOptions{Config: `authorization { user: relay, password: right }`})
	_, err := Connect(t.Context(), ConnConfig{URL: srv.URL()})
	wantError(t, err, "Authorization Violation")
	file := writeFile(t, "password", "wrong-s3cret\n")
	cfg := ConnConfig{URL: srv.URL(), User: "relay", PasswordFile: file}
	_, err = Connect(t.Context(), cfg)
	wantError(t, err, "Authorization Violation", srv.URL())
	if text := err.Error() + hint.Of(err); strings.Contains(text, "s3cret") || !strings.Contains(text, "nats.password_file") {
		t.Errorf("error %s", text)
	}

	if err := os.WriteFile(file, []byte("right\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var sig signals
	sig.set(&cfg)
	connect(t, cfg)

	// A wrong password at a reconnect is no end: the file may be written again.
	if err := os.WriteFile(file, []byte("wrong"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := srv.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, sig.disconnected, "disconnect")
	for range 3 { // twice is where nats.go gives up by default
		if err := receive(t, sig.errs, "authorization error"); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("error %v", err)
		}
	}
	if err := os.WriteFile(file, []byte("right"), 0o600); err != nil {
		t.Fatal(err)
	}
	receive(t, sig.reconnected, "reconnect")
}

func TestConnectToken(t *testing.T) {
	srv := testenv.NewNATS(t, testenv.NATSOptions{Config: `authorization { token: right }`})
	file := writeFile(t, "token", "wrong-s3cret\n")
	cfg := ConnConfig{URL: srv.URL(), TokenFile: file}
	_, err := Connect(t.Context(), cfg)
	wantError(t, err, "Authorization Violation", srv.URL())
	if text := err.Error() + hint.Of(err); strings.Contains(text, "s3cret") || !strings.Contains(text, "nats.token_file") {
		t.Errorf("error %s", text)
	}
	if err := os.WriteFile(file, []byte("right\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	connect(t, cfg)
	cfg.User, cfg.PasswordFile = "relay", file
	_, err = Connect(t.Context(), cfg)
	wantError(t, err, "more than one of creds, nkey, user and token_file is set")
}

func TestConnectNKey(t *testing.T) {
	user := must(nkeys.CreateUser())(t)
	seed, public := must(user.Seed())(t), must(user.PublicKey())(t)
	srv := testenv.NewNATS(t, testenv.NATSOptions{Config: `authorization { users: [ { nkey: ` + public + ` } ] }`})
	connect(t, ConnConfig{URL: srv.URL(), NKey: writeFile(t, "relay.nk", string(seed)+"\n")})

	other := must(must(nkeys.CreateUser())(t).Seed())(t)
	_, err := Connect(t.Context(), ConnConfig{URL: srv.URL(), NKey: writeFile(t, "other.nk", string(other))})
	wantError(t, err, "Authorization Violation")
	if text := err.Error() + hint.Of(err); strings.Contains(text, string(other)) || !strings.Contains(text, "nats.nkey") {
		t.Errorf("error %s", text)
	}
}

// TestConnectComesBack also holds that a publish during an outage fails at once
// and is not sent later, and that the context is the first connect's only.
func TestConnectComesBack(t *testing.T) {
	srv := testenv.NewNATS(t, testenv.NATSOptions{})
	cfg := ConnConfig{URL: srv.URL(), Name: "relay-1"}
	var sig signals
	sig.set(&cfg)
	ctx, cancel := context.WithCancel(t.Context())
	nc := must(Connect(ctx, cfg))(t)
	defer func() {
		nc.Close()
		receive(t, sig.closed, "close")
	}()
	cancel()
	if err := srv.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, sig.disconnected, "disconnect")
	for nc.Status() != nats.RECONNECTING {
		time.Sleep(time.Millisecond)
	}
	if err := nc.Publish("x", nil); !errors.Is(err, nats.ErrReconnectBufExceeded) {
		t.Errorf("publish during an outage: %v", err)
	}
	if n, err := nc.Buffered(); n != 0 {
		t.Errorf("%d bytes wait for the server to come back (%v)", n, err)
	}
	if err := srv.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, sig.reconnected, "reconnect")
	if err := nc.Publish("x", nil); err != nil {
		t.Error(err)
	}
	o := nc.Opts
	if o.Name != "relay-1" || o.ReconnectBufSize != -1 || o.MaxReconnect != -1 || o.PingInterval > 20*time.Second || !o.IgnoreAuthErrorAbort {
		t.Errorf("options %+v", o)
	}
}

func TestConnectClosed(t *testing.T) {
	cfg := ConnConfig{URL: testenv.NewNATS(t, testenv.NATSOptions{}).URL()}
	var sig signals
	sig.set(&cfg)
	nc := must(Connect(t.Context(), cfg))(t)
	nc.Close()
	receive(t, sig.closed, "close")
}

// TestParseURLsRepeatsNoSecret, whatever is wrong with a URL.
func TestParseURLsRepeatsNoSecret(t *testing.T) {
	for _, urls := range []string{
		"s3cret", "nats://u:s3cret,x@h", "nats://u:x,s3cret@h", "u:s3cret@h", "nats://u:s3cret%zz@h", "http://u:s3cret@h", "nats://u:s3cret@", "nats://h:99999,nats://s3cret@h",
		"nats:s3cret", "nats://h,s3cret", "nats://u:4222,s3cret@h:4222",
	} {
		_, err := Connect(t.Context(), ConnConfig{URL: urls})
		if err == nil || strings.Contains(err.Error()+hint.Of(err), "s3cret") {
			t.Errorf("%s: %v", urls, err)
		}
	}
}

// TestUnverified: only this machine may be reached without TLS.
func TestUnverified(t *testing.T) {
	for _, c := range []struct {
		cfg  ConnConfig
		want string
	}{
		{ConnConfig{URL: "nats://n1:4222"}, "n1"},
		{ConnConfig{URL: "ws://n1,nats://10.0.0.1,tls://n3,wss://n4"}, "n1 10.0.0.1"},
		{ConnConfig{URL: "nats://localhost,nats://127.0.0.1:4222,nats://[::1]"}, ""},
		{ConnConfig{URL: "nats://n1", TLS: TLSConfig{CA: "ca.pem"}}, ""},
		{ConnConfig{URL: "nats://n1", TLS: TLSConfig{First: true}}, ""},
	} {
		if got := strings.Join(c.cfg.Unverified(), " "); got != c.want {
			t.Errorf("%s: %q, want %q", c.cfg.URL, got, c.want)
		}
	}
}
