package jetstream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
)

// connectError adds what helps to an error of the first connect.
func connectError(cfg ConnConfig, urls []*url.URL, err error) error {
	at := redact(urls)
	return hint.Wrap(fmt.Errorf("connect to NATS at %s: %w", at, err), connectHint(cfg, urls, at, err))
}

func connectHint(cfg ConnConfig, urls []*url.URL, at string, err error) string {
	var dns *net.DNSError
	var record tls.RecordHeaderError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.Is(err, nats.ErrNoServers):
		return "nothing listens at " + at + ": start nats-server there, or correct nats.url"
	case errors.As(err, &dns):
		return "the host name does not resolve: correct nats.url"
	case cfg.TLS.First && (errors.As(err, &record) || errors.Is(err, io.EOF)):
		return "the server does not begin with the TLS handshake: " +
			"take nats.tls.handshake_first out, or set handshake_first in the server's tls block"
	case !cfg.TLS.First &&
		(errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) && cfg.wantsTLS(urls)):
		return "the server has ended the connection without a greeting: " +
			"if its tls block has handshake_first, set nats.tls.handshake_first: true; " +
			"else check host and port of nats.url"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "what listens at " + at + " does not greet as nats-server does: " +
			"check host and port of nats.url"
	case isAuthError(err):
		return authHint(cfg)
	case strings.Contains(err.Error(), "remote error: tls"),
		strings.Contains(err.Error(), "after TLS handshake"):
		return "the server asks for a client certificate that it trusts: set nats.tls.cert and nats.tls.key"
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the server has no TLS: take nats.tls out, use nats:// in nats.url, " +
			"or enable TLS on the server"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "the server's certificate has expired: renew it, or correct this machine's clock"
	case isCertificateError(err):
		return "the server's certificate is not trusted: " +
			"set nats.tls.ca to its authority, and use a host name that it holds"
	}
	return "check nats.url, and that nats-server can be reached from here"
}

func (cfg *ConnConfig) wantsTLS(urls []*url.URL) bool {
	isTLS := func(u *url.URL) bool { return u.Scheme == "tls" }
	return cfg.TLS != TLSConfig{} || slices.ContainsFunc(urls, isTLS)
}

func isAuthError(err error) bool {
	for _, target := range []error{
		nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired,
		nats.ErrNkeysNotSupported,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

func authHint(cfg ConnConfig) string {
	switch {
	case cfg.Creds != "":
		return "the server refused the credentials in nats.creds: " +
			"they may be expired, revoked, or of another account"
	case cfg.NKey != "":
		return "the server refused the key in nats.nkey: add its public key to the server's users"
	case cfg.User != "":
		return "the server refused nats.user: check the name and the password in nats.password_file"
	case cfg.TokenFile != "":
		return "the server refused the token in nats.token_file"
	}
	return "the server wants to know who connects: " +
		"set nats.creds, nats.nkey, nats.token_file, or nats.user and nats.password_file"
}

func isCertificateError(err error) bool {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &authority) || errors.As(err, &host) || errors.As(err, &invalid)
}

// PermissionSubject reads which subject a permission error is about; publish is
// false where it is about subscribing. The server never says it in a reply, only
// through [ConnConfig.OnError], and in words.
func PermissionSubject(err error) (subject string, publish, ok bool) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return "", false, false
	}
	_, what, ok := strings.Cut(err.Error(), "Permissions Violation for ")
	if !ok {
		return "", false, false
	}
	verb, rest, ok := strings.Cut(what, ` "`)
	if !ok {
		return "", false, false
	}
	quoted, perr := strconv.QuotedPrefix(`"` + rest)
	if perr != nil {
		return "", false, false
	}
	subject, perr = strconv.Unquote(quoted)
	// "Publish with Reply of" names the reply subject: an inbox, no row's.
	return subject, verb == "Publish to", perr == nil
}
