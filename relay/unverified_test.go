package relay_test

import (
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestStartWarnsOfWeakTLS: the log of a start says of each server that its certificate is not verified, and
// says nothing where both are on loopback.
func TestStartWarnsOfWeakTLS(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	said := func(x *running, code string) (text string) {
		for _, e := range x.logs.All() {
			if e.ContextMap()["code"] == code {
				text += e.Message
			}
		}
		return text
	}
	x := r.start().streaming()
	x.halt()
	for _, code := range []string{"pg-tls-weak", "nats-tls-weak"} {
		if text := said(x, code); text != "" {
			t.Errorf("on one machine the log says %q", text)
		}
	}
	const other = "0.0.0.0" // it leads to this machine, and could be any
	r.cfg.PostgresURL = strings.Replace(r.url, "127.0.0.1", other, 1)
	r.cfg.NATS.URL = strings.Replace(r.nats.URL(), "127.0.0.1", other, 1)
	x = r.start().streaming()
	x.halt()
	for code, host := range map[string]string{"pg-tls-weak": "PostgreSQL at " + other, "nats-tls-weak": "NATS at " + other} {
		if text := said(x, code); strings.Count(text, host) != 1 {
			t.Errorf("%s: the log says %q, want %s once", code, text, host)
		}
	}
}
