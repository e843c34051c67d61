package main

import (
	"maps"
	"os"

	"github.com/spf13/pflag"

	"github.com/walpost/walpost/internal/pg"
)

// over lays the environment over the file, and the flags over both.
func (l *loader) over(flags *pflag.FlagSet) {
	l.layer(func() { l.environment(os.LookupEnv) })
	l.layer(func() { l.flags(flags) })
}

// layer reads a source that goes before those read so far. Its URL takes the place of their url_file, and
// the other way round. Their password_file stays where it may belong to the URL: where that brings no
// password and keeps the user.
func (l *loader) layer(read func()) {
	before := maps.Clone(l.origin)
	was := l.cfg.Postgres.URL
	read()
	p := &l.cfg.Postgres
	given := func(name string) bool { return l.origin[name] != before[name] }
	replaced := func(name string, value *string, by string) {
		if *value != "" && !given(name) {
			*value, l.origin[name] = "", "not with "+l.origin[by]
		}
	}
	switch {
	case given("postgres.url"):
		if pg.HasPassword(p.URL) || before["postgres.url"] != "" && pg.User(p.URL) != pg.User(was) {
			replaced("postgres.password_file", &p.PasswordFile, "postgres.url")
		}
		replaced("postgres.url_file", &p.URLFile, "postgres.url")
	case given("postgres.url_file"): // it is secret, so it has a password
		replaced("postgres.password_file", &p.PasswordFile, "postgres.url_file")
		if before["postgres.url"] != "" {
			p.URL = ""
			delete(l.origin, "postgres.url")
		}
	}
}
