package jetstream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/secretfile"
)

// CheckFiles reports the first file that Connect could not use.
func (cfg *ConnConfig) CheckFiles() error {
	_, err := cfg.auth()
	return err
}

// auth checks every file once, so that a missing one is named at the start and
// not as an authorization violation.
func (cfg *ConnConfig) auth() ([]nats.Option, error) {
	given := 0
	for _, s := range []string{cfg.Creds, cfg.NKey, cfg.User, cfg.TokenFile} {
		if s != "" {
			given++
		}
	}
	if given > 1 {
		return nil, hint.Errorf("keep the one that the server expects",
			"nats: more than one of creds, nkey, user and token_file is set")
	}
	if (cfg.User == "") != (cfg.PasswordFile == "") {
		return nil, hint.Errorf("set both, or neither", "nats: user and password_file come together")
	}
	opts, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	switch {
	case cfg.Creds != "":
		return cfg.creds(opts)
	case cfg.NKey != "":
		return cfg.nkey(opts)
	case cfg.User != "":
		return cfg.password(opts)
	case cfg.TokenFile != "":
		return cfg.token(opts)
	}
	return opts, nil
}

// creds reads the file as the client does at every connect.
func (cfg *ConnConfig) creds(opts []nats.Option) ([]nats.Option, error) {
	if err := readable("nats.creds", cfg.Creds); err != nil {
		return nil, err
	}
	opt := nats.UserCredentials(cfg.Creds)
	var client nats.Options
	err := opt(&client)
	if err == nil {
		_, err = client.UserJWT()
	}
	if err == nil {
		_, err = client.SignatureCB(nil)
	}
	if err != nil {
		// The cause could quote the file.
		return nil, hint.Errorf("it holds a user's JWT and seed, as nsc generate creds writes them",
			"nats.creds: %s holds no credentials", cfg.Creds)
	}
	return append(opts, opt), nil
}

func (cfg *ConnConfig) nkey(opts []nats.Option) ([]nats.Option, error) {
	if err := readable("nats.nkey", cfg.NKey); err != nil {
		return nil, err
	}
	opt, err := nats.NkeyOptionFromSeed(cfg.NKey)
	if err != nil {
		// The cause could quote the file.
		return nil, hint.Errorf("it holds one line, a user seed that begins with SU (nk -gen user)",
			"nats.nkey: %s holds no user seed", cfg.NKey)
	}
	return append(opts, opt), nil
}

// password reads the file at every connect, so that it can be rotated; while it
// cannot be read, the last password that could is sent.
func (cfg *ConnConfig) password(opts []nats.Option) ([]nats.Option, error) {
	read, err := rereading("nats.password_file", cfg.PasswordFile)
	if err != nil {
		return nil, err
	}
	user := cfg.User
	return append(opts, nats.UserInfoHandler(func() (string, string) { return user, read() })), nil
}

// token is like password.
func (cfg *ConnConfig) token(opts []nats.Option) ([]nats.Option, error) {
	read, err := rereading("nats.token_file", cfg.TokenFile)
	if err != nil {
		return nil, err
	}
	return append(opts, nats.TokenHandler(read)), nil
}

// rereading reads a secret, and again at each call. While that fails, the secret is the last one.
func rereading(key, file string) (read func() string, err error) {
	last, err := secretfile.Read(key, file)
	return func() string {
		if s, err := secretfile.Read(key, file); err == nil {
			last = s
		}
		return last
	}, err
}

func (cfg *ConnConfig) tls() ([]nats.Option, error) {
	t := cfg.TLS
	var opts []nats.Option
	if (t.Cert == "") != (t.Key == "") {
		return nil, hint.Errorf("set both, or neither", "nats.tls: cert and key come together")
	}
	if t.CA != "" {
		if err := readable("nats.tls.ca", t.CA); err != nil {
			return nil, err
		}
		if err := checkPEM(t.CA); err != nil {
			return nil, hint.Errorf("it holds one or more certificates in PEM form",
				"nats.tls.ca: %s: %w", t.CA, err)
		}
		opts = append(opts, nats.RootCAs(t.CA))
	}
	if t.Cert != "" {
		if err := readable("nats.tls.cert", t.Cert); err != nil {
			return nil, err
		}
		if err := readable("nats.tls.key", t.Key); err != nil {
			return nil, err
		}
		if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
			return nil, hint.Errorf("both are PEM files, and the key belongs to the certificate",
				"nats.tls: load cert and key: %w", err)
		}
		opts = append(opts, nats.ClientCert(t.Cert, t.Key), nats.Secure())
	}
	if t.First {
		opts = append(opts, nats.TLSHandshakeFirst(), nats.Secure())
	}
	return opts, nil
}

func checkPEM(file string) error {
	b, err := os.ReadFile(file)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(b) {
		err = errors.New("no certificate in it")
	}
	return err
}

func readable(key, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return fileError(key, err)
	}
	return f.Close()
}

func fileError(key string, err error) error {
	return hint.Wrap(fmt.Errorf("%s: %w", key, err), "check the path and that walpost's user may read it")
}
