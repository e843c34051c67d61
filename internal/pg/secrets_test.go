package pg

import (
	"slices"
	"strings"
	"testing"
)

// TestParseRepeatsNoSecret, whatever is wrong with the URL.
func TestParseRepeatsNoSecret(t *testing.T) {
	for _, url := range []string{
		"s3cret", "s3cret@h", "postgres://u:s3cret@h:port/db", "postgres://u:s3cret%zz@h/db",
		"host=h password=s3cret port=x", "host=h password='s3cret", "postgres://u:s3cret@h/db?sslmode=s3cret", "postgres://u@h/db?connect_timeout=s3cret",
		"postgres://u:p`: failed to configure TLS s3cret@h:x/db", "postgres://u@h/db?target_session_attrs=s3cret",
		"postgres://u:12/s3cret@h/db", "postgres://u:12?s3cret@h/db", "postgres://u:12#s3cret@h/db", "postgresql://u:12/s3cret@h",
	} {
		_, err := Parse(Config{URL: url})
		if err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// TestParseTakesAnAt where it is no sign of a password.
func TestParseTakesAnAt(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://u:p@h/a%40b": "a@b", "postgres://u:p@q@h/db": "db", "postgres:///db?host=@socket": "db", "host=h dbname=a@b": "a@b",
	} {
		if cfg, err := Parse(Config{URL: url}); err != nil || cfg.Database != want {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// TestUnverified: only this machine may be reached without TLS or with a certificate that nobody looks at.
func TestUnverified(t *testing.T) {
	t.Setenv("PGSSLMODE", "")
	for url, want := range map[string][]string{
		"postgres://u@db/x":                                  {"db"},
		"postgres://u@db/x?sslmode=disable":                  {"db"},
		"postgres://u@db/x?sslmode=allow":                    {"db"},
		"postgres://u@db/x?sslmode=require":                  {"db"},
		"postgres://u@db/x?sslmode=verify-ca":                nil,
		"postgres://u@db/x?sslmode=verify-full":              nil,
		"postgres://u@localhost/x":                           nil,
		"postgres://u@127.0.0.9/x":                           nil,
		"postgres://u@[::1]/x":                               nil,
		"host=/var/run/postgresql user=u":                    nil,
		"postgres://u@localhost,db2,db3/x":                   {"db2", "db3"},
		"postgres://u@localhost,db2,db3/x?sslmode=verify-ca": nil,
	} {
		if got := (Config{URL: url}).Unverified(); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", url, got, want)
		}
	}
}
