package pg

import (
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
)

// safeCauses are the beginnings of what pgx says behind the connection string that it quotes.
var safeCauses = []string{
	"failed to configure TLS", "invalid port", "invalid connect_timeout", "invalid sslcertmode",
	"invalid require_auth",
	"unknown target_session_attrs value", "unknown channel_binding value", "failed to read service",
}

// parseURL repeats none of its input in an error: in a text that cannot be parsed, any part may be the
// password.
func parseURL(s string) (*pgx.ConnConfig, error) {
	if cutOff(s) {
		return nil, hint.Errorf(
			"percent-encode the password: / is %2F, ? is %3F, # is %23, and an @ in a database's name is %40",
			"an @ stands behind the end of host and port: "+
				"a password with / ? or # would be taken for the database")
	}
	cfg, err := pgx.ParseConfig(s)
	if err == nil {
		return cfg, nil
	}
	cause := "it is neither a URL nor keywords and values"
	text := err.Error()
	text = text[strings.LastIndex(text, "`: ")+1:]
	begins := func(c string) bool { return strings.HasPrefix(text, ": "+c) }
	if i := slices.IndexFunc(safeCauses, begins); i >= 0 {
		cause = safeCauses[i]
	}
	var file *fs.PathError
	if errors.As(err, &file) {
		cause += ": " + file.Error()
	}
	return nil, hint.Errorf(
		"want postgres://user@host:5432/database?sslmode=verify-full, with special characters "+
			"percent-encoded", "%s", cause)
}

// HasPassword reports whether a URL, or keywords and values, have a password.
func HasPassword(s string) bool {
	if strings.HasPrefix(s, "postgres://") || strings.HasPrefix(s, "postgresql://") {
		u, err := url.Parse(s)
		if err != nil {
			return false // which the connection's error says
		}
		_, has := u.User.Password()
		return has || u.Query().Has("password")
	}
	return keyword.MatchString(s)
}

var keyword = regexp.MustCompile(`(^|\s)password\s*=`)

// User is the user of a URL, or of keywords and values; "" where they cannot be read.
func User(s string) string {
	cfg, err := pgx.ParseConfig(s)
	if err != nil {
		return ""
	}
	return cfg.User
}

// cutOff reports whether a URL's password may end too early, at one of / ? #: user and password would be the
// host and port then, and the rest a name that a server's error repeats.
func cutOff(s string) bool {
	if !strings.HasPrefix(s, "postgres://") && !strings.HasPrefix(s, "postgresql://") {
		return false
	}
	u, err := url.Parse(s)
	if err != nil {
		return false // pgx says so, too
	}
	for name := range u.Query() {
		if strings.Contains(name, "@") {
			return true
		}
	}
	return strings.Contains(u.EscapedPath(), "@") || u.Fragment != ""
}

// Unverified are the hosts of the URL, beyond this machine, to which a connection may be made without TLS or
// without a look at the server's certificate: whoever answers in their place gets the password and the rows.
func (c Config) Unverified() []string {
	cfg, err := c.parse()
	if err != nil {
		return nil
	}
	var hosts []string
	check := func(host string, verified bool) {
		if !verified && !local(host) && !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	verifies := func(c *tls.Config) bool {
		return c != nil && (!c.InsecureSkipVerify || c.VerifyPeerCertificate != nil)
	}
	check(cfg.Host, verifies(cfg.TLSConfig))
	for _, f := range cfg.Fallbacks {
		check(f.Host, verifies(f.TLSConfig))
	}
	return hosts
}

// local reports whether a host is a Unix socket or this machine.
func local(host string) bool {
	ip := net.ParseIP(host)
	socket := strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@")
	return socket || host == "localhost" || ip != nil && ip.IsLoopback()
}
