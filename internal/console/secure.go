package console

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// policy lets the page load what this server has, and nothing else. Nothing inline runs.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// secure is what every request below /ui passes through.
func (c *Console) secure(next http.Handler) http.Handler {
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, nil, refuse(http.StatusForbidden,
			"use the console's own page, or a client that is no browser",
			"the request comes from another site"))
	}))
	next = origin.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// LoopbackOnly is for a server that listens on a loopback address. It refuses requests for other hosts: a
// name that somebody points at 127.0.0.1 would be of the same origin as their page.
func LoopbackOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLoopback(r.Host) {
			answer(w, nil, refuse(http.StatusMisdirectedRequest,
				"open it as http://127.0.0.1 or http://localhost",
				"this server is for its own machine, not for host %q", r.Host))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func isLoopback(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = strings.Trim(hostport, "[]")
	}
	if strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		return true
	}
	address, err := netip.ParseAddr(host)
	return err == nil && address.Unmap().IsLoopback()
}

// mayRead checks the token, where there is one.
func (c *Console) mayRead(w http.ResponseWriter, r *http.Request) error {
	if c.cfg.Token == "" || c.holdsToken(r) {
		return nil
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	return refuse(http.StatusUnauthorized,
		"take the token that `walpost ui` prints, or the one of http.token_file",
		"the console's token is missing or wrong")
}

// holdsToken compares hashes: the time that it takes tells nothing of the token, nor of its length.
func (c *Console) holdsToken(r *http.Request) bool {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	given, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(c.cfg.Token))
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(given[:], want[:]) == 1
}

// changeHint is why nothing can be changed; empty where it can.
func (c *Console) changeHint() string {
	if c.cfg.Token == "" {
		return "set http.token_file (WALPOST_HTTP_TOKEN_FILE) to change something, or run `walpost ui`"
	}
	return ""
}

// showsPayloads: who may read the relay's status may not read payloads.
func (c *Console) showsPayloads() bool { return c.cfg.Token != "" }

// mayChange checks what a change needs beside the token.
func (c *Console) mayChange(r *http.Request) error {
	if advice := c.changeHint(); advice != "" {
		return refuse(http.StatusForbidden, advice, "this console only shows")
	}
	if !isJSON(r) {
		// A form of another site could send other types without being asked for.
		return refuse(http.StatusUnsupportedMediaType, "send Content-Type: application/json",
			"content type %q is not application/json", r.Header.Get("Content-Type"))
	}
	return nil
}
