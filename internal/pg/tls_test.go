package pg_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
)

// TestTLS: a connection that is to be verified is refused, with what helps, where the server has no TLS, another name, an expired
// certificate or another authority.
func TestTLS(t *testing.T) {
	good := testenv.NewPostgres(t, testenv.PGOptions{TLS: true})
	expired := testenv.NewPostgres(t, testenv.PGOptions{TLS: true, TLSUntil: time.Now().Add(-time.Hour)})
	plain := testenv.NewPostgres(t, testenv.PGOptions{})
	url := func(p *testenv.Postgres, roots *testenv.Postgres, mode string) string {
		base, _, _ := strings.Cut(p.URL("postgres"), "?")
		return base + "?sslmode=" + mode + "&sslrootcert=" + filepath.Join(roots.Dir(), "server.crt")
	}
	conn, err := pg.Connect(t.Context(), pg.Config{URL: url(good, good, "verify-full")})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct{ url, hint string }{
		"no TLS":              {url(plain, good, "verify-full"), "enable TLS on the server"},
		"no TLS, unverified":  {strings.Replace(plain.URL("postgres"), "sslmode=disable", "sslmode=require", 1), "enable TLS on the server"},
		"another name":        {strings.Replace(url(good, good, "verify-full"), "127.0.0.1", "localhost", 1), "host name"},
		"expired certificate": {url(expired, expired, "verify-full"), "has expired"},
		"expired, any name":   {url(expired, expired, "verify-ca"), "has expired"},
		"another authority":   {url(good, expired, "verify-full"), "sslrootcert"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := pg.Connect(t.Context(), pg.Config{URL: c.url})
			if err == nil {
				_ = conn.Close(t.Context())
				t.Fatal("it connects")
			}
			if !strings.Contains(hint.Of(err), c.hint) {
				t.Errorf("%v (hint: %s), want a hint about %q", err, hint.Of(err), c.hint)
			}
		})
	}
}
