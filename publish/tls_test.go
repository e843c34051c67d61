package publish

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// authority signs certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(tb testing.TB) *authority {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(tb)
	tpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der := must(x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key))(tb)
	return &authority{cert: must(x509.ParseCertificate(der))(tb), key: key, file: writePEM(tb, "CERTIFICATE", der)}
}

// issue returns the files of a certificate for 127.0.0.1 and of its key.
func (a *authority) issue(tb testing.TB) (cert, key string) {
	k := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(tb)
	tpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "walpost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der := must(x509.CreateCertificate(rand.Reader, tpl, a.cert, &k.PublicKey, a.key))(tb)
	return writePEM(tb, "CERTIFICATE", der), writePEM(tb, "EC PRIVATE KEY", must(x509.MarshalECPrivateKey(k))(tb))
}

func writePEM(tb testing.TB, kind string, der []byte) string {
	return writeFile(tb, "file.pem", string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

func TestConnectTLS(t *testing.T) {
	ca, stranger := newAuthority(t), newAuthority(t)
	cert, key := ca.issue(t)
	block := `tls { cert_file: %q, key_file: %q, ca_file: %q, verify: %v }`
	open := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(block, cert, key, ca.file, false)})
	mutual := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(block, cert, key, ca.file, true)})
	plain := testenv.NewNATS(t, testenv.NATSOptions{})
	first := testenv.NewNATS(t, testenv.NATSOptions{Config: fmt.Sprintf(`tls { cert_file: %q, key_file: %q, handshake_first: true, timeout: 1 }`, cert, key)})
	tlsURL := func(s string) string { return strings.Replace(s, "nats://", "tls://", 1) }

	connect(t, ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: ca.file}})
	connect(t, ConnConfig{URL: tlsURL(open.URL()), TLS: TLSConfig{CA: ca.file}})
	connect(t, ConnConfig{URL: tlsURL(first.URL()), TLS: TLSConfig{CA: ca.file, First: true}})
	mine, myKey := ca.issue(t)
	nc := connect(t, ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.file, Cert: mine, Key: myKey}})
	if !nc.TLSRequired() {
		t.Error("no TLS")
	}

	foreign, foreignKey := stranger.issue(t)
	for name, tt := range map[string]struct {
		cfg  ConnConfig
		hint string
	}{
		"handshake first":      {ConnConfig{URL: first.URL(), TLS: TLSConfig{CA: ca.file}}, "set nats.tls.handshake_first: true"},
		"handshake not first":  {ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: ca.file, First: true}}, "take nats.tls.handshake_first out"},
		"unknown authority":    {ConnConfig{URL: open.URL()}, "nats.tls.ca"},
		"wrong authority":      {ConnConfig{URL: open.URL(), TLS: TLSConfig{CA: stranger.file}}, "nats.tls.ca"},
		"wrong host":           {ConnConfig{URL: strings.Replace(open.URL(), "127.0.0.1", "localhost", 1), TLS: TLSConfig{CA: ca.file}}, "host name"},
		"no client cert":       {ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.file}}, "nats.tls.cert"},
		"foreign cert":         {ConnConfig{URL: mutual.URL(), TLS: TLSConfig{CA: ca.file, Cert: foreign, Key: foreignKey}}, "nats.tls.cert"},
		"server without TLS":   {ConnConfig{URL: plain.URL(), TLS: TLSConfig{CA: ca.file}}, "enable TLS"},
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
