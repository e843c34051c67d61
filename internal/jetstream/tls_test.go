package jetstream

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

func TestConnectTLS(t *testing.T) {
	ca, stranger := testenv.NewAuthority(t), testenv.NewAuthority(t)
	cert, key := ca.Issue(t)
	block := `tls { cert_file: %q, key_file: %q, ca_file: %q, verify: %v }`
	open := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(block, cert, key, ca.File, false)})
	mutual := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(block, cert, key, ca.File, true)})
	plain := testenv.NewNATS(t, testenv.NATSOptions{})
	first := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(`tls { cert_file: %q, key_file: %q, handshake_first: true, timeout: 1 }`, cert, key)})
	old, oldKey := ca.IssueUntil(t, time.Now().Add(-time.Hour))
	expired := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(block, old, oldKey, ca.File, false)})
	tlsURL := func(s string) string { return strings.Replace(s, "nats://", "tls://", 1) }

	connect(t, ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: ca.File}})
	connect(t, ConnConfig{URL: tlsURL(open.URL()), TLS: TLSConfig{CA: ca.File}})
	connect(t, ConnConfig{URL: tlsURL(first.URL()), TLS: TLSConfig{CA: ca.File, First: true}})
	mine, myKey := ca.Issue(t)
	nc := connect(t, ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.File, Cert: mine, Key: myKey}})
	if !nc.TLSRequired() {
		t.Error("no TLS")
	}

	foreign, foreignKey := stranger.Issue(t)
	for name, tt := range map[string]struct {
		cfg  ConnConfig
		hint string
	}{
		"handshake first":      {ConnConfig{URL: first.URL(), TLS: TLSConfig{CA: ca.File}}, "set nats.tls.handshake_first: true"},
		"handshake not first":  {ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: ca.File, First: true}}, "take nats.tls.handshake_first out"},
		"unknown authority":    {ConnConfig{URL: open.URL()}, "nats.tls.ca"},
		"wrong authority":      {ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: stranger.File}}, "nats.tls.ca"},
		"wrong host":           {ConnConfig{URL: strings.Replace(open.URL(), "127.0.0.1", "localhost", 1), TLS: TLSConfig{CA: ca.File}}, "host name"},
		"expired certificate":  {ConnConfig{URL: expired.URL(), TLS: TLSConfig{CA: ca.File}}, "has expired"},
		"no client cert":       {ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.File}}, "nats.tls.cert"},
		"foreign cert":         {ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.File, Cert: foreign, Key: foreignKey}}, "nats.tls.cert"},
		"server without TLS":   {ConnConfig{URL: plain.URL(), TLS: TLSConfig{CA: ca.File}}, "enable TLS"},
		"tls:// without TLS":   {ConnConfig{URL: tlsURL(plain.URL())}, "enable TLS"},
		"cert with server off": {ConnConfig{URL: plain.URL(), TLS: TLSConfig{Cert: mine, Key: myKey}}, "enable TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Connect(t.Context(), tt.cfg)
			wantError(t, err, "connect to NATS")
			if !strings.Contains(hint.Of(err), tt.hint) {
				t.Errorf("%v (hint: %s), want a hint about %q", err, hint.Of(err), tt.hint)
			}
		})
	}
}
