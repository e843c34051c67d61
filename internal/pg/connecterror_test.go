package pg

import (
	"errors"
	"testing"
)

func TestPlain(t *testing.T) {
	const about, refused = "failed to connect to `user=x database=y`:", "tls error: server refused TLS connection"
	for _, c := range []struct{ name, text, want string }{
		{"none", about + " 127.0.0.1:1 (h): dial error", about + " 127.0.0.1:1 (h): dial error"},
		{"TLS is wanted", about + " 127.0.0.1:1 (h): " + refused, about + " 127.0.0.1:1 (h): " + refused},
		{
			"the plain attempt got further",
			about + "\n\t127.0.0.1:1 (h): " + refused + "\n\t127.0.0.1:1 (h): failed SASL auth: FATAL: password authentication failed",
			about + " 127.0.0.1:1 (h): failed SASL auth: FATAL: password authentication failed",
		},
		{
			"another host refuses TLS",
			about + "\n\t[::1]:1 (h): " + refused + "\n\t127.0.0.1:1 (h): " + refused + "\n\t127.0.0.1:1 (h): no",
			about + "\n\t[::1]:1 (h): " + refused + "\n\t127.0.0.1:1 (h): no",
		},
	} {
		err := errors.New(c.text)
		got := plain(err)
		if got.Error() != c.want || !errors.Is(got, err) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if plain(nil) != nil {
		t.Error("an error out of nothing")
	}
}
