package relay

import (
	"strings"

	"github.com/walpost/walpost/internal/check"
)

// unverified warns of connections that another machine on the way can read, or answer in the server's place.
func (s *starter) unverified() (f check.Findings) {
	const text = "the connection to %s may be made without TLS, or without a look at the certificate: " +
		"whoever answers there gets the credentials"
	if hosts := s.cfg.server().Unverified(); len(hosts) > 0 {
		f.Warning("pg-tls-weak", "add sslmode=verify-full to postgres.url, and sslrootcert=<file> where "+
			"the authority is your own", text,
			"PostgreSQL at "+strings.Join(hosts, ", "))
	}
	if hosts := s.cfg.NATS.Unverified(); len(hosts) > 0 {
		f.Warning("nats-tls-weak", "write tls:// in nats.url, and set nats.tls.ca where the authority is "+
			"your own", text,
			"NATS at "+strings.Join(hosts, ", "))
	}
	return f
}
