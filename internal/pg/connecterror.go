package pg

import (
	"slices"
	"strings"
)

// connectError is an error of pgx with another text.
type connectError struct {
	text string
	err  error
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.err }

// plain leaves out attempts with TLS that a server refused, where the attempt without TLS tells more: with
// sslmode=prefer, the default, it follows.
func plain(err error) error {
	const refused = ": tls error: server refused TLS connection"
	if err == nil || !strings.Contains(err.Error(), refused) {
		return err
	}
	attempts := strings.Split(err.Error(), "\n\t") // the first is what they are about
	told := slices.DeleteFunc(slices.Clone(attempts), func(a string) bool {
		address, isRefused := strings.CutSuffix(a, refused)
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
