package relay_test

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
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

// TestURLFileNamesAnotherHost: the file with the URL names another host while a term goes on. The term ends, and the next one goes there.
func TestURLFileNamesAnotherHost(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	file := filepath.Join(t.TempDir(), "url")
	r.must(os.WriteFile(file, []byte(r.url), 0o600))
	r.cfg.PostgresURL, r.cfg.PostgresFiles = "", pg.Files{URL: file}
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	r.must(os.WriteFile(file, []byte(strings.Replace(r.url, "127.0.0.1", "localhost", 1)), 0o600))
	if said := fmt.Sprint(x.alarmed("another_server")); !strings.Contains(said, "postgres.url does not name 127.0.0.1") {
		t.Errorf("the alarm says %s", said)
	}
	eventually(t, "another term streams", func() bool { return x.logged("streaming").Len() == 2 })
	r.put(11, 20)
	r.pending(0)
	x.halt()
	r.storedIs(1, 20)
}
