package relay_test

import (
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
)

// TestSecretsAreRotated while the relay runs: first the password, then role and password.
func TestSecretsAreRotated(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.exec(`CREATE ROLE one SUPERUSER LOGIN PASSWORD 'first'; CREATE ROLE two SUPERUSER LOGIN PASSWORD 'third'`)
	r.wantPasswords("one,two")
	file := func(name string) string { return filepath.Join(t.TempDir(), name) }
	secrets := pg.Files{URL: file("url"), Password: file("password")}
	r.cfg.PostgresURL, r.cfg.PostgresFiles = "", secrets
	set := func(role, password string) {
		u, err := url.Parse(r.url)
		r.must(err)
		u.User = url.UserPassword(role, "the file goes before")
		r.must(os.WriteFile(secrets.URL, []byte(u.String()+"\n"), 0o600))
		r.must(os.WriteFile(secrets.Password, []byte(password+"\n"), 0o600))
	}
	set("one", "first")
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)

	r.exec(`ALTER ROLE one PASSWORD 'second'`)
	set("one", "second")
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'one'`)
	r.put(6, 10)
	r.pending(0)

	r.exec(`ALTER ROLE one NOLOGIN`)
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'one'`)
	eventually(t, "the relay is refused", func() bool { return x.Status().State == "waiting" })
	set("two", "third")
	r.put(11, 15)
	r.pending(0)
	r.storedIs(1, 15)
}

// wantPasswords has the server ask the roles for their passwords.
func (r *rig) wantPasswords(roles string) {
	r.t.Helper()
	hba := filepath.Join(r.pg.Dir(), "pg_hba.conf")
	old, err := os.ReadFile(hba)
	r.must(err)
	r.must(os.WriteFile(hba, append([]byte("host all "+roles+" 127.0.0.1/32 scram-sha-256\n"), old...), 0o600))
	r.exec(`SELECT pg_reload_conf()`)
}
