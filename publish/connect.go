package publish

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
)

// ConnConfig says how to reach NATS. At most one of Creds, NKey and User is
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

// TLSConfig holds PEM files. CA replaces the system's roots; Cert and Key
// come together. Any of them makes TLS required.
type TLSConfig struct{ CA, Cert, Key string }

// Connect makes the first connection or fails within seconds, trying every
// server once; from then on the connection comes back by itself, for ever.
// While it is away a publish fails at once and nothing is buffered: a message
// that the client reported as failed must not be stored later.
func Connect(ctx context.Context, cfg ConnConfig) (*nats.Conn, error) {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 5 * time.Second
	}
	urls, err := parseURLs(cfg.URL)
	if err != nil {
		return nil, err
	}
	auth, err := cfg.auth()
	if err != nil {
		return nil, err
	}
	first := newDialer(ctx, cfg.Timeout)
	defer first.connected()
	opts := append(auth, nats.SetCustomDialer(first))
	nc, err := nats.Connect(strings.Join(urls, ","), append(opts, cfg.options()...)...)
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

const urlHint = "nats.url is nats://host:4222, or several separated by commas"

// parseURLs fails without repeating a URL, because it may hold a password.
func parseURLs(s string) ([]string, error) {
	var urls []string
	for i, one := range strings.Split(s, ",") {
		one = strings.TrimSpace(one)
		if one == "" {
			return nil, hint.Errorf(urlHint, "nats.url: entry %d is empty", i+1)
		}
		if !strings.Contains(one, "://") {
			one = "nats://" + one
		}
		u, err := url.Parse(one)
		if err != nil {
			var bad *url.Error
			if errors.As(err, &bad) {
				err = bad.Err
			}
			return nil, hint.Errorf(urlHint, "nats.url: entry %d is not a URL%s", i+1, unlessSecret(one, err))
		}
		switch u.Scheme {
		case "nats", "tls", "ws", "wss":
		default:
			return nil, hint.Errorf(urlHint, "nats.url: entry %d (%s) has scheme %q, want nats, tls, ws or wss", i+1, u.Redacted(), u.Scheme)
		}
		if u.Hostname() == "" {
			return nil, hint.Errorf(urlHint, "nats.url: entry %d (%s) names no host", i+1, u.Redacted())
		}
		urls = append(urls, one)
	}
	return urls, nil
}

func unlessSecret(s string, err error) string {
	if strings.Contains(s, "@") {
		return ""
	}
	return fmt.Sprintf(": %q: %v", s, err)
}

// redact renders URLs for an error: hosts without user names and passwords.
func redact(urls []string) string {
	out := make([]string, len(urls))
	for i, s := range urls {
		if u, err := url.Parse(s); err == nil {
			u.User = nil
			out[i] = u.String()
		}
	}
	return strings.Join(out, ", ")
}
