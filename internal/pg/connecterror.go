package pg

import (
	"crypto/x509"
	"errors"
	"slices"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

// tlsHint is what helps where a connection with TLS fails, or "".
func tlsHint(err error) string {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case err == nil:
		return ""
	case strings.Contains(err.Error(), refusedTLS):
		return "enable TLS on the server and name its authority (sslrootcert=...), or change sslmode in " +
			"postgres.url"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "the server's certificate has expired: renew it, or correct this machine's clock"
	case errors.As(err, &host):
		return "use a host name that the server's certificate holds"
	case errors.As(err, &authority):
		return "set sslrootcert to a file with the authority of the server's certificate"
	}
	return ""
}

// refusedTLS ends an attempt with TLS that the server refused.
const refusedTLS = ": tls error: server refused TLS connection"

// connectError is an error of pgx with another text.
type connectError struct {
	text string
	err  error
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.err }

// plain is an error of a connection attempt without what tells nothing, and with what helps.
func plain(err error) error {
	err = withoutRefusals(err)
	if text := tlsHint(err); text != "" {
		return hint.Wrap(err, text)
	}
	return err
}

// withoutRefusals leaves out attempts with TLS that a server refused, where the attempt without TLS tells
// more: with sslmode=prefer, the default, it follows.
func withoutRefusals(err error) error {
	if err == nil || !strings.Contains(err.Error(), refusedTLS) {
		return err
	}
	attempts := strings.Split(err.Error(), "\n\t") // the first is what they are about
	told := slices.DeleteFunc(slices.Clone(attempts), func(a string) bool {
		address, isRefused := strings.CutSuffix(a, refusedTLS)
		return isRefused && slices.ContainsFunc(attempts, func(other string) bool {
			return other != a && strings.HasPrefix(other, address+": ")
		})
	})
	if len(told) == len(attempts) {
		return err
	}
	text := strings.Join(told, "\n\t")
	if len(told) == 2 {
		text = strings.Join(told, " ")
	}
	return &connectError{text, err}
}
