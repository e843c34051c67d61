package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/setup"
)

// names looks for names that another relay has already, as that of a second database on the same servers
// would meet them one after the other. It proposes free ones, all in one command.
type names struct {
	own   string // of the database, as a part of a name
	texts []string
	flags map[string]string
}

func (n *names) taken(flags map[string]string, format string, args ...any) {
	n.texts = append(n.texts, fmt.Sprintf(format, args...))
	for name, value := range flags {
		n.flags[name] = value
	}
}

// checkNames is about a set-up that is new. One that has its file has its names.
func (c *initConfig) checkNames(
	ctx context.Context, flags *pflag.FlagSet, o *initOptions, s *setup.Setup, writer string,
) error {
	theirs := c.fileOf != "" && c.fileOf != s.Database() && !o.force
	if c.exists && !theirs {
		return nil
	}
	n := &names{own: namePart(s.Database()), flags: map[string]string{}}
	if theirs {
		n.taken(map[string]string{
			"config":   filepath.Join(filepath.Dir(c.path), n.own+".yaml"),
			"nats-url": c.cfg.NATS.URL,
		}, "%s is that of database %q", c.path, c.fileOf)
	}
	exists, known, err := s.HasRole()
	if err != nil {
		return err
	}
	onlyRole := exists && (theirs || !known)
	if onlyRole {
		n.taken(map[string]string{"role": o.role + "_" + n.own}, "role %q exists", o.role)
	}
	if err := c.serverNames(ctx, n, s, writer); err != nil {
		return err
	}
	if len(n.texts) == 0 || onlyRole && len(n.texts) == 1 { // whose password the plan asks for
		return nil
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

// serverNames are those of the slot, the stream and the relay's address.
func (c *initConfig) serverNames(ctx context.Context, n *names, s *setup.Setup, writer string) error {
	slot, stream, listen := c.cfg.Postgres.Slot, c.cfg.NATS.Stream, c.cfg.HTTP.Listen
	database, err := s.SlotOf(ctx, slot)
	if err != nil {
		return err
	}
	if database != "" && database != s.Database() {
		n.taken(map[string]string{"slot": shorten(slot+"_"+n.own, 59)},
			"slot %q is that of database %q", slot, database)
	}
	if writer != "" {
		n.taken(map[string]string{
			"stream": stream + "_" + strings.ToUpper(n.own), "subject": n.own + ".{event_type}",
		}, "stream %s has the messages of %s", stream, writer)
	}
	if port := usedPort(listen); port != 0 {
		host, _, _ := net.SplitHostPort(listen)
		for port++; port < 1<<16 && usedPort(net.JoinHostPort(host, strconv.Itoa(port))) != 0; port++ {
		}
		n.taken(map[string]string{"http-listen": net.JoinHostPort(host, strconv.Itoa(port))},
			"%s is in use", listen)
	}
	return nil
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
		value, proposed := n.flags[f.Name]
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
