package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/secretfile"
	"github.com/walpost/walpost/internal/setup"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// initConfig is the configuration as init reads it, and as it is to be written.
type initConfig struct {
	*loader
	admin pg.Config
	path  string // of the file
	// passwordFile is the relay's.
	passwordFile string
	exists       bool   // the file
	fileOf       string // its database
}

// theAdmins are the keys that name the admin's connection in flags and environment, and the relay's in the
// file.
var theAdmins = []string{"postgres.url", "postgres.url_file", "postgres.password_file"}

// loadInit lays file, environment and flags over each other, as every command does. The file is the one that
// init writes: it need not exist, and the connection in it is the relay's.
func loadInit(
	ctx context.Context, flags *pflag.FlagSet, o *initOptions, t talk,
) (*initConfig, error) {
	c := &initConfig{loader: newLoader()}
	path, err := configFile(flags)
	if err != nil && !errors.Is(err, fs.ErrPermission) { // a package's file is only its user's
		return nil, &usageError{err}
	}
	c.path = cmp.Or(path, defaultConfigFile)
	_, err = os.Stat(c.path)
	if c.exists = err == nil; c.exists {
		if err := c.loader.file(flags); err != nil {
			return nil, &usageError{err}
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, &usageError{unreadable(err)}
	}
	c.passwordFile = absolute(strings.TrimSuffix(c.path, filepath.Ext(c.path)) + ".password")
	if c.origin["postgres.url"]+c.origin["postgres.url_file"] != "" {
		c.fileOf = databaseOf(&c.cfg.Postgres)
	}
	if c.cfg.Postgres.PasswordFile != "" {
		c.passwordFile = absolute(c.cfg.Postgres.PasswordFile)
	}
	if c.origin["postgres.url"] != "" && !flags.Changed("role") {
		if conn, err := pg.Parse(c.cfg.Postgres.server()); err == nil {
			o.role = conn.User
		}
	}
	for _, k := range c.cfg.keys() {
		if slices.Contains(theAdmins, k.name) {
			_ = k.Set(k.initial)
			delete(c.origin, k.name)
		}
	}
	c.over(flags)
	c.choose(o)
	c.layouts()
	if err := c.askURLs(ctx, t); err != nil {
		return nil, err
	}
	if t.terminal && o.app == "" && !o.yes && !o.print && !c.exists {
		o.app = t.ask("Role of the application, which is to insert events (empty: none yet): ")
		if err := checkRole("app", o.app); err != nil {
			return nil, &usageError{err}
		}
	}
	if err := c.finished(); err != nil {
		return nil, err
	}
	c.admin = c.cfg.Postgres.server()
	if _, err := setup.RelayURL(c.admin, o.role, ""); err != nil {
		return nil, &usageError{err}
	}
	return c, nil
}

// source is the ce-source of the relay, "" where the role may not read the server's identifier.
func (c *initConfig) source(ctx context.Context, s *setup.Setup) (string, error) {
	if c.cfg.Source != "" {
		return c.cfg.Source, nil
	}
	id, err := s.SystemID(ctx)
	if err != nil || id == "" {
		return "", err
	}
	return relay.DefaultSource(id, s.Database()), nil
}

// choose is what init does where nothing else is said.
func (c *initConfig) choose(o *initOptions) {
	if o.poll {
		c.cfg.Mode, c.origin["mode"] = "poll", "--poll"
	}
	o.poll = c.cfg.Mode == "poll"
	if c.exists {
		return // what the file leaves out is the default, as for every command
	}
	said := func(name string) bool { return c.origin[name] != "" }
	o0 := &c.cfg.Outboxes[0]
	if !said("outboxes[0].table") && !said("outboxes[0].layout") && !said("outboxes[0].mark") {
		o0.Layout, c.origin["outboxes[0].layout"] = LayoutConfig{Name: outbox.Append().Name}, "init"
	}
	if o0.Layout.Name == outbox.Append().Name && !said("retention.delete_after") { // it has no archive
		c.cfg.Retention.DeleteAfter, c.origin["retention.delete_after"] = c.cfg.Retention.DropAfter, "init"
	}
}

// askURLs asks for the servers that nothing names.
func (c *initConfig) askURLs(ctx context.Context, t talk) error {
	p := &c.cfg.Postgres
	if c.origin["postgres.url"] == "" && p.URLFile != "" {
		p.URL = ""
		return nil
	}
	if c.origin["postgres.url"] == "" {
		if t.terminal {
			p.URL = t.ask("URL of PostgreSQL, as a superuser or the database's owner. " +
				"Leave the password out: it is asked for next, and not shown.\n" +
				"(postgres://user@host:5432/database): ")
		}
		if !t.terminal || p.URL == "" {
			return &usageError{hint.Errorf("give --postgres-url postgres://postgres@host:5432/database, "+
				"WALPOST_POSTGRES_URL or WALPOST_POSTGRES_URL_FILE",
				"init needs a superuser's URL of PostgreSQL, or that of the database's owner")}
		}
		c.origin["postgres.url"] = "standard input"
		if err := c.askPassword(ctx, t); err != nil {
			return err
		}
	}
	if c.origin["nats.url"] == "" && t.terminal {
		if answer := t.ask("URL of NATS (" + c.cfg.NATS.URL + "): "); answer != "" {
			c.cfg.NATS.URL = answer
		}
		c.origin["nats.url"] = "standard input"
	}
	return nil
}

// askPassword asks for a password that neither the URL that was typed nor a file nor PGPASSWORD has: the
// terminal shows a URL.
func (c *initConfig) askPassword(ctx context.Context, t talk) error {
	p := &c.cfg.Postgres
	conn, err := pg.Parse(p.server())
	if err != nil || conn.Password != "" || !strings.Contains(p.URL, "://") {
		return nil // what is wrong with the URL is told with the rest of the configuration
	}
	password, err := t.askHidden(ctx, "Password of "+conn.User+" (not shown; empty: none): ")
	if err != nil || password == "" {
		return err
	}
	separator := "?"
	if strings.Contains(p.URL, "?") {
		separator = "&"
	}
	// PostgreSQL takes a + for itself, not for a space.
	p.URL += separator + "password=" + strings.ReplaceAll(url.QueryEscape(password), "+", "%20")
	return nil
}

func (c *initConfig) setup(o *initOptions) setup.Config {
	tables, _ := c.cfg.Tables() // they were checked when they were read
	return setup.Config{
		Admin: c.admin, Owner: c.cfg.Postgres.Owner, Role: o.role, App: o.app, Outboxes: tables,
		Schema:      c.cfg.Postgres.own(tables).Schema,
		Publication: c.cfg.Postgres.Publication, Poll: o.poll,
		PasswordFile: c.passwordFile, NewPassword: o.newPassword,
	}
}

// makeRelays turns the configuration into the relay's.
func (c *initConfig) makeRelays(ctx context.Context, o *initOptions, s *setup.Setup) error {
	url, err := setup.RelayURL(c.admin, o.role, s.Database())
	if err != nil {
		return err
	}
	p := &c.cfg.Postgres
	p.URL, p.URLFile, p.PasswordFile = url, "", c.passwordFile
	delete(c.origin, "postgres.url_file")
	for _, name := range []string{"postgres.url", "postgres.password_file", "nats.url"} {
		c.origin[name] = "init"
	}
	owner, err := s.OwnersName(ctx)
	if err != nil {
		return err
	}
	if owner != "" {
		p.Owner, c.origin["postgres.owner"] = owner, "init"
	}
	for _, k := range c.cfg.keys() {
		if isPath[k.name] && k.String() != "" && !strings.HasPrefix(c.origin[k.name], c.path+":") {
			_ = k.Set(absolute(k.String()))
		}
	}
	return nil
}

// isPath lists the keys that name a file. Those of a flag are relative to where init runs, and the relay may
// run elsewhere.
var isPath = map[string]bool{
	"nats.creds": true, "nats.nkey": true, "nats.password_file": true, "nats.token_file": true,
	"nats.tls.ca": true, "nats.tls.cert": true, "nats.tls.key": true, "catalog.path": true,
}

// file is the step that writes the configuration. It refuses a file that says something else.
func (c *initConfig) file(force bool) (*setup.Step, error) {
	step := setup.NewFile("The relay's configuration: its URL without the password, and where that stands.",
		c.path, func() error { return secretfile.Write(c.path, c.yaml()) })
	if !c.exists {
		return step, nil
	}
	others, err := c.differs()
	if err != nil {
		return nil, err
	}
	step.Done = len(others) == 0
	if step.Done || force {
		return step, nil
	}
	return nil, hint.Errorf("leave the flags out; or --force replaces the file, or --config names another",
		"%s exists, and says something else: %s", c.path, strings.Join(others, ", "))
}

// differs lists the keys that the file has otherwise.
func (c *initConfig) differs() (names []string, err error) {
	there := newLoader()
	data, err := os.ReadFile(c.path)
	if err != nil {
		return nil, err
	}
	if err := there.yaml(c.path, data); err != nil {
		return nil, err
	}
	there.layouts()
	values := map[string]string{}
	for _, k := range there.cfg.keys() {
		values[k.name] = k.String()
	}
	for _, k := range c.cfg.keys() {
		was, is := values[k.name], k.String()
		if k.name == "postgres.password_file" && was != "" {
			was = absolute(was)
		}
		if was != is {
			names = append(names, k.name)
		}
	}
	return names, nil
}

// yaml is the file: what is not the default.
func (c *initConfig) yaml() string {
	var keys []key
	for _, k := range c.cfg.keys() {
		if c.origin[k.name] != "" {
			keys = append(keys, k)
		}
	}
	above := func(k key) []string {
		if k.name == "retention.delete_after" {
			return []string{"How long after it was processed an event is deleted. 0s: they stay for ever."}
		}
		return nil
	}
	return "# Written by walpost init. `walpost config example` explains every key.\n\n" +
		renderYAML(keys, above, func(k key) string { return yamlText(k, k.String()) })
}
