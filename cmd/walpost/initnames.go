package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/setup"
)

// names are those that another relay has already. They are told all at once, with a command that has free
// ones.
type names struct {
	texts []string
	flags []string          // those that are to have another value
	free  map[string]string // these values
	here  bool              // another relay of this database has some of them
	port  string            // an address that no program listens at
}

func (n *names) taken(flags []string, format string, args ...any) {
	n.texts = append(n.texts, fmt.Sprintf(format, args...))
	n.flags = append(n.flags, flags...)
}

// checkNames is about a set-up that is new. One whose file names its database has its names.
func (c *initConfig) checkNames(
	ctx context.Context, flags *pflag.FlagSet, o *initOptions, s *setup.Setup, nats *natsState,
) error {
	theirs := c.fileOf != "" && c.fileOf != s.Database() && !o.force
	if c.fileOf != "" && !theirs {
		return nil
	}
	n := &names{}
	if theirs {
		n.taken([]string{"config", "nats-url"}, "%s is that of database %q", c.path, c.fileOf)
	}
	exists, known, err := s.HasRole()
	if err != nil {
		return err
	}
	onlyRole := exists && (theirs || !known && !c.exists)
	if onlyRole {
		n.taken([]string{"role"}, "role %q exists", o.role)
	}
	if err := c.serverNames(ctx, n, s, nats); err != nil {
		return err
	}
	if !c.exists || theirs {
		c.freePort(n)
	}
	if len(n.texts) == 0 || onlyRole && len(n.texts) == 1 { // whose password the plan asks for
		return nil
	}
	if err := c.propose(ctx, n, o, s); err != nil {
		return err
	}
	command, left := n.command(flags)
	advice := "choose names of its own, as in: "
	if len(left) > 0 { // a redacted URL would be refused
		advice = "choose names of its own, and add " + strings.Join(left, " and ") +
			" with the password, as in: "
	}
	return hint.Errorf(advice+command,
		"another relay seems to have these names: %s", strings.Join(n.texts, "; "))
}

// serverNames are those of the publication, the slot and the stream. Relays of the same outbox share them:
// they stand by for each other.
func (c *initConfig) serverNames(ctx context.Context, n *names, s *setup.Setup, nats *natsState) error {
	slot := c.cfg.Postgres.Slot
	use, err := s.SlotUse(ctx, slot)
	if err != nil {
		return err
	}
	known, err := c.publicationName(ctx, n, s)
	if err != nil {
		return err
	}
	switch {
	case use.Database != "" && use.Database != s.Database():
		n.taken([]string{"slot"}, "slot %q is that of database %q", slot, use.Database)
	case use.Streams, !known && (use.Database != "" || use.Locked):
		n.taken([]string{"slot"}, "slot %q is that of another outbox in this database", slot)
		n.here = true
	}
	switch {
	case nats.taken != "":
		n.taken(nats.flags, "%s", nats.taken)
	case nats.unused && !known && len(n.texts) > 0:
		n.taken([]string{"stream", "subject"}, "stream %s is that of a relay", c.cfg.NATS.Stream)
	}
	return nil
}

// publicationName is about the publication. known: this relay was set up before, and the slot may be its
// own.
func (c *initConfig) publicationName(ctx context.Context, n *names, s *setup.Setup) (known bool, err error) {
	if c.cfg.Mode == "poll" {
		return s.Reads(ctx)
	}
	known, others, err := s.Publication(ctx)
	if len(others) > 0 {
		n.taken([]string{"publication"}, "publication %q is that of %s", c.cfg.Postgres.Publication,
			strings.Join(others, ", "))
		n.here = true
		if c.origin["postgres.slot"] == "" { // its first run makes the slot
			n.flags = append(n.flags, "slot")
		}
	}
	return known, err
}

func (c *initConfig) freePort(n *names) {
	listen := c.cfg.HTTP.Listen
	port := usedPort(listen)
	if port == 0 {
		return
	}
	host, _, _ := net.SplitHostPort(listen)
	for port++; port < 1<<16 && usedPort(net.JoinHostPort(host, strconv.Itoa(port))) != 0; port++ {
	}
	n.taken([]string{"http-listen"}, "%s is in use", listen)
	n.port = net.JoinHostPort(host, strconv.Itoa(port))
}

// propose chooses free values for the flags: the names that are taken, with an ending for this relay.
func (c *initConfig) propose(ctx context.Context, n *names, o *initOptions, s *setup.Setup) error {
	ending := namePart(s.Database())
	if t := s.Outbox(); n.here && t.Schema != "public" {
		ending = namePart(t.Schema)
	} else if n.here {
		ending = namePart(t.Name)
	}
	const most = 100 // then the names are told without another look
	for i, own := 2, ending; ; i++ {
		n.free = c.named(own, o)
		free, err := c.areFree(ctx, n, s)
		if err != nil || free || i > most {
			n.free["http-listen"] = n.port
			return err
		}
		own = ending + "_" + strconv.Itoa(i)
	}
}

// named are the names that end in own.
func (c *initConfig) named(own string, o *initOptions) map[string]string {
	end := func(name string, most int) string { return shorten(name, most-len(own)-1) + "_" + own }
	return map[string]string{
		"config": filepath.Join(filepath.Dir(c.path), own+".yaml"), "nats-url": c.cfg.NATS.URL,
		"role": end(o.role, 63), "slot": end(c.cfg.Postgres.Slot, 59),
		"publication": end(c.cfg.Postgres.Publication, 63),
		"stream":      c.cfg.NATS.Stream + "_" + strings.ToUpper(own), "subject": own + ".{event_type}",
	}
}

// areFree reports whether the names that are proposed are.
func (c *initConfig) areFree(ctx context.Context, n *names, s *setup.Setup) (free bool, err error) {
	proposed := func(flag string) string {
		if slices.Contains(n.flags, flag) {
			return n.free[flag]
		}
		return ""
	}
	if path := proposed("config"); path != "" {
		if _, err := os.Lstat(path); err == nil {
			return false, nil
		}
	}
	free, err = s.Free(ctx, proposed("role"), proposed("slot"), proposed("publication"))
	if err != nil || !free || proposed("subject") == "" {
		return free, err
	}
	cfg := *c.cfg
	cfg.NATS.Subject = n.free["subject"]
	if stream := proposed("stream"); stream != "" {
		cfg.NATS.Stream = stream
	}
	state, err := lookAtNATS(ctx, &cfg, "", nil)
	return err == nil && !state.exists && state.taken == "", err
}

// command is init with the flags that were given, and those that are proposed. left are those that it leaves
// out, because their values have a password.
func (n *names) command(flags *pflag.FlagSet) (command string, left []string) {
	command = "walpost init"
	add := func(name, value string) {
		if strings.ContainsAny(value, " {}$&?'\"*;()<>|\\") {
			value = "'" + strings.ReplaceAll(value, "'", `'\''`) + "'"
		}
		command += " --" + name + " " + value
	}
	flags.VisitAll(func(f *pflag.Flag) {
		value, proposed := n.free[f.Name], slices.Contains(n.flags, f.Name)
		if f.Changed && !proposed {
			value = f.Value.String()
		}
		switch {
		case hasSecret(f.Name, value):
			left = append(left, "--"+f.Name)
		case proposed:
			add(f.Name, value)
		case f.Changed && f.Value.Type() == "bool" && value == "true":
			command += " --" + f.Name
		case f.Changed:
			add(f.Name, value)
		}
	})
	return command, left
}

// hasSecret reports whether a flag's value is a URL with a password or a token.
func hasSecret(flag, value string) bool {
	return flag == "postgres-url" && strings.Contains(redactPostgres(value), secret) ||
		flag == "nats-url" && value != "" && strings.Contains(redactNATS(value), secret)
}

// usedPort is the port of an address that another program listens at, or 0.
func usedPort(address string) int {
	ln, err := net.Listen("tcp", address)
	if err == nil {
		_ = ln.Close()
		return 0
	}
	_, text, _ := net.SplitHostPort(address)
	port, _ := strconv.Atoi(text)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return 0
	}
	return port
}

// namePart turns a database's name into letters that may be in any of the names.
func namePart(database string) string {
	part := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(database))
	return shorten(part, 20)
}

func shorten(s string, most int) string { return strings.TrimRight(s[:min(len(s), most)], "_") }

// databaseOf is the database of a connection in a file, "" where the file does not say.
func databaseOf(p *PostgresConfig) string {
	conn, err := pg.Parse(pg.Config{URL: p.URL, Files: pg.Files{URL: p.URLFile}})
	if err != nil {
		return ""
	}
	return conn.Database
}
