package main

import "testing"

// TestStrongerURL: what a flag or variable says of the connection goes before the file, whole.
func TestStrongerURL(t *testing.T) {
	const url = "postgres: {url: 'postgres://relay@h/db', password_file: pw}"
	for _, c := range []struct {
		name, yaml, env string
		args            []string
		url, file, pw   string
	}{
		{"a password", url, "", []string{"--postgres-url", "postgres://relay:secret@h/db"}, "postgres://relay:secret@h/db", "", ""},
		{"a parameter", url, "postgres://h/db?password=secret", nil, "postgres://h/db?password=secret", "", ""},
		{"keywords", url, "host=h user=relay password=secret", nil, "host=h user=relay password=secret", "", ""},
		{"another user", url, "postgres://owner@h/db", nil, "postgres://owner@h/db", "", ""},
		{"the same user", url, "postgres://relay@other/db", nil, "postgres://relay@other/db", "", "pw"},
		{"no user before", "postgres: {password_file: pw}", "postgres://owner@h/db", nil, "postgres://owner@h/db", "", "pw"},
		{
			"its own file", url, "",
			[]string{"--postgres-url", "postgres://owner@h/db", "--postgres-password-file", "own"},
			"postgres://owner@h/db", "", "own",
		},
		{"a file over a URL", url, "", []string{"--postgres-url-file", "u"}, "", "u", ""},
		{
			"a URL over a file", "postgres: {url_file: u, password_file: pw}", "postgres://relay:secret@h/db", nil,
			"postgres://relay:secret@h/db", "", "",
		},
		{"two layers", url, "postgres://owner:secret@h/db", []string{"--postgres-url", "postgres://x@h/db"}, "postgres://x@h/db", "", ""},
	} {
		t.Setenv("WALPOST_POSTGRES_URL", c.env)
		l, err := loadFile(t, c.yaml, c.args...)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if p := l.cfg.Postgres; p.URL != c.url || p.URLFile != c.file || p.PasswordFile != c.pw {
			t.Errorf("%s: url %q, url_file %q, password_file %q", c.name, p.URL, p.URLFile, p.PasswordFile)
		}
	}
}
