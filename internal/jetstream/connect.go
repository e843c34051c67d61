package jetstream

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
)

// ConnConfig says how to reach NATS. At most one of Creds, NKey, User and TokenFile is
// given; a secret is read from its file again at every reconnect.
type ConnConfig struct {
	// URL is one URL or several, separated by commas; nats, tls, ws and wss.
	URL string
	// Name is shown by the server; empty is "walpost".
	Name string
	// Creds is a credentials file (JWT and seed), NKey a file with a user seed.
	Creds string
	NKey  string
	// User comes with the file that holds its password.
	User         string
	PasswordFile string
	TokenFile    string // with a token alone
	TLS          TLSConfig
	// InboxPrefix replaces _INBOX in reply subjects, for narrow permissions.
	InboxPrefix string
	// Timeout bounds the first contact with each server; 0 is 5 s.
	Timeout time.Duration

	// The callbacks run on the connection's own goroutine, in order; they must
	// not block. Any may be nil. After OnDisconnect nothing that was published
	// and not acknowledged can be relied on.
	OnDisconnect func(error)
	OnReconnect  func()
	// OnError receives what belongs to no call: permission errors come only here.
	OnError func(error)
	// OnClosed is final: the connection is not coming back.
	OnClosed func(error)
}

// TLSConfig holds PEM files. CA replaces the system's roots; Cert and Key come together.
// First begins with the TLS handshake, as a server with handshake_first wants it. Any of them
// makes TLS required.
type TLSConfig struct {
	CA, Cert, Key string
	First         bool
}

// Connect makes the first connection or fails within seconds, trying every
// server once; from then on the connection comes back by itself, for ever.
// While it is away a publish fails at once and nothing is buffered: a message
// that the client reported as failed must not be stored later.
func Connect(ctx context.Context, cfg ConnConfig) (*nats.Conn, error) {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 5 * time.Second
	}
	urls, err := ParseURLs(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("parse nats.url: %w", err)
	}
	auth, err := cfg.auth()
	if err != nil {
		return nil, err
	}
	first := newDialer(ctx, cfg.Timeout)
	defer first.connected()
	opts := append(auth, nats.SetCustomDialer(first))
	nc, err := nats.Connect(joined(urls), append(opts, cfg.options()...)...)
	if ctx.Err() != nil {
		if nc != nil {
			nc.Close()
		}
		return nil, fmt.Errorf("connect to NATS: %w", ctx.Err())
	}
	if err != nil {
		return nil, connectError(cfg, urls, err)
	}
	return nc, nil
}

func (cfg *ConnConfig) options() []nats.Option {
	name := cfg.Name
	if name == "" {
		name = "walpost"
	}
	opts := []nats.Option{
		nats.Name(name),
		nats.Timeout(cfg.Timeout),
		nats.ReconnectBufSize(-1), // see Connect
		nats.MaxReconnects(-1),
		nats.ReconnectWait(250 * time.Millisecond),
		nats.IgnoreAuthErrorAbort(), // an expired credential may be renewed in its file
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.FlusherTimeout(10 * time.Second), // a server that does not read is a lost one
	}
	if cfg.InboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(cfg.InboxPrefix))
	}
	return append(opts, cfg.handlers()...)
}

func (cfg *ConnConfig) handlers() []nats.Option {
	return []nats.Option{
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { call(cfg.OnDisconnect, err) }),
		nats.ReconnectHandler(func(*nats.Conn) {
			if cfg.OnReconnect != nil {
				cfg.OnReconnect()
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { call(cfg.OnError, err) }),
		nats.ClosedHandler(func(nc *nats.Conn) { call(cfg.OnClosed, nc.LastError()) }),
	}
}

func call(f func(error), err error) {
	if f != nil {
		f(err)
	}
}

const urlHint = "nats.url is nats://host:4222, or several separated by commas; " +
	"tls, ws and wss are the other schemes. In user and password " +
	"write %2C for a comma, and percent-encode other special characters"

// ParseURLs reads nats.url. Its errors repeat nothing of it: in a text that is not a list of URLs, any part
// may be a password. That is why an entry without a port needs a scheme: a password alone would pass for a
// host.
func ParseURLs(s string) ([]*url.URL, error) {
	var urls []*url.URL
	for i, one := range strings.Split(s, ",") {
		one = strings.TrimSpace(one)
		if one == "" {
			return nil, hint.Errorf(urlHint, "entry %d is empty", i+1)
		}
		_, port, err := net.SplitHostPort(one)
		if err == nil && port != "" && !strings.ContainsAny(one, "@/") {
			one = "nats://" + one
		}
		u, err := url.Parse(one)
		switch {
		case err != nil:
			return nil, hint.Errorf(urlHint, "entry %d is not a URL", i+1)
		case !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) || u.Opaque != "":
			return nil, hint.Errorf(urlHint,
				"entry %d does not begin with nats://, tls://, ws:// or wss://", i+1)
		case u.Hostname() == "":
			return nil, hint.Errorf(urlHint, "entry %d names no host", i+1)
		}
		if port, err := strconv.Atoi(cmp.Or(u.Port(), "0")); err != nil || port > 65535 {
			return nil, hint.Errorf(urlHint, "the port of entry %d is not 0 to 65535", i+1)
		}
		urls = append(urls, u)
	}
	return urls, nil
}

// Unverified are the hosts of nats.url, beyond this machine, to which a connection may be made without TLS: a
// machine that answers in their place gets the credentials and the events. With TLS the certificate is always
// verified.
func (cfg *ConnConfig) Unverified() (hosts []string) {
	urls, _ := ParseURLs(cfg.URL)
	for _, u := range urls {
		ip := net.ParseIP(u.Hostname())
		local := u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
		if !local && u.Scheme != "tls" && u.Scheme != "wss" && cfg.TLS == (TLSConfig{}) {
			hosts = append(hosts, u.Hostname())
		}
	}
	return hosts
}

func joined(urls []*url.URL) string {
	out := make([]string, len(urls))
	for i, u := range urls {
		out[i] = u.String()
	}
	return strings.Join(out, ",")
}

// redact renders URLs for an error: scheme and host alone.
func redact(urls []*url.URL) string {
	out := make([]string, len(urls))
	for i, u := range urls {
		out[i] = u.Scheme + "://" + u.Host
	}
	return strings.Join(out, ", ")
}
