// Package pg connects to PostgreSQL. On its connections functions, operators and types resolve in pg_catalog
// only: whoever may create objects in another schema cannot have his own called with the connection's
// privileges.
//
// Statements name tables by their schema, and everything else as pg_catalog has it, unqualified.
package pg

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/secretfile"
)

// Config says how to reach a database.
type Config struct {
	URL   string
	Files Files
	// Settings are sent as run-time parameters.
	Settings map[string]string
	// Dial opens TCP connections; nil is pgx's own way.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// One keeps the connections of all configurations that share it on one server; nil does not.
	One *OneServer
}

// Files name the secrets that stand in files. They are read at every connection, so that a secret can be
// rotated.
type Files struct {
	// URL is a file with the whole URL. Config.URL does not count then.
	URL string
	// Password is a file with the password. It goes before any other, such as one in the URL.
	Password string
}

// connectTimeout bounds the attempt for each host, unless the URL has a connect_timeout: a host that accepts
// and says nothing would be waited for without end.
const connectTimeout = 10 * time.Second

// Connect opens a connection.
func Connect(ctx context.Context, c Config) (*pgx.Conn, error) {
	cfg, err := c.parse()
	if err != nil {
		return nil, err
	}
	conn, err := ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", c.explain(err))
	}
	return conn, nil
}

// ConnectConfig opens a connection as a configuration of [Parse] says.
func ConnectConfig(ctx context.Context, cfg *pgx.ConnConfig) (*pgx.Conn, error) {
	cfg = cfg.Copy()
	Protect(&cfg.Config)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	return conn, plain(err)
}

// ConnectRaw opens a connection without pgx's part, as replication needs it. The options come last.
func ConnectRaw(ctx context.Context, c Config, options ...func(*pgconn.Config)) (*pgconn.PgConn, error) {
	cfg, err := c.parse() // it knows more URL parameters than pgconn
	if err != nil {
		return nil, err
	}
	Protect(&cfg.Config)
	for _, option := range options {
		option(&cfg.Config)
	}
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	return conn, c.explain(plain(err))
}

// explain names the file of a password that the server refused: the URL has none.
func (c Config) explain(err error) error {
	if c.Files.Password == "" || Code(err) != pgerrcode.InvalidPassword {
		return err
	}
	return hint.Wrap(err, "check the password in "+c.Files.Password+" (postgres.password_file); "+
		"`walpost init --new-password` gives the relay's role a new one")
}

func (c Config) parse() (*pgx.ConnConfig, error) {
	url, err := c.ReadURL()
	if err != nil {
		return nil, err
	}
	cfg, err := parseURL(url)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", c.key(), err)
	}
	if c.Files.Password != "" {
		if cfg.Password, err = secretfile.Read("postgres.password_file", c.Files.Password); err != nil {
			return nil, err
		}
	}
	for k, v := range c.Settings {
		cfg.RuntimeParams[k] = v
	}
	if c.Dial != nil {
		cfg.DialFunc = c.Dial
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = connectTimeout
	}
	if c.One != nil {
		err = c.One.confine(&cfg.Config)
	}
	return cfg, err
}

// ReadURL is the URL, or the one that stands in the file. The password file is not looked at.
func (c Config) ReadURL() (string, error) {
	if c.Files.URL == "" {
		return c.URL, nil
	}
	return secretfile.Read(c.key(), c.Files.URL)
}

// key is where the configuration has the URL.
func (c Config) key() string {
	if c.Files.URL != "" {
		return "postgres.url_file"
	}
	return "postgres.url"
}

// Parse reads a URL, or keywords and values, and the files, for connections that others open, such as those
// of a pool.
func Parse(c Config) (*pgx.ConnConfig, error) {
	cfg, err := c.parse()
	if err == nil {
		Protect(&cfg.Config)
	}
	return cfg, err
}

// CheckURL tells what is wrong with a URL, or with keywords and values.
func CheckURL(url string) error {
	_, err := parseURL(url)
	return err
}
