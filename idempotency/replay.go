package idempotency

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"
)

// ReplayedHeader is "true" in a response that comes from the table.
const ReplayedHeader = "Idempotency-Replayed"

// notStored are the headers of one connection or one moment, and cookies: a session that was opened for one
// client is no part of what a repetition gets.
var notStored = map[string]bool{
	"Connection": true, "Content-Length": true, "Date": true, "Keep-Alive": true, "Proxy-Authenticate": true,
	"Proxy-Authorization": true, "Proxy-Connection": true, "Set-Cookie": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, ReplayedHeader: true,
}

// storedHeader is the header as JSON in ASCII, whatever bytes it has: jsonb refuses some, and a database's
// encoding may lack others.
func storedHeader(h http.Header) string {
	hop := map[string]bool{}
	for _, value := range h["Connection"] {
		for name := range strings.SplitSeq(value, ",") {
			hop[textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))] = true
		}
	}
	stored := map[string][]string{}
	for name, values := range h {
		name := http.CanonicalHeaderKey(name)
		if notStored[name] || hop[name] || strings.HasPrefix(name, http.TrailerPrefix) {
			continue
		}
		escaped := make([]string, len(values))
		for i, v := range values {
			escaped[i] = escapeASCII(v)
		}
		stored[escapeASCII(name)] = escaped
	}
	text, _ := json.Marshal(stored) // maps of strings always succeed
	return string(text)
}

// escapeASCII writes a percent sign, and what is not printable ASCII, as %XX.
func escapeASCII(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c == '%' || c < ' ' || c > '~' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// stored is the response in a row.
type stored struct {
	status int
	header string // JSON of storedHeader
	body   []byte // nil where it was too large
}

func (s *stored) replay(w http.ResponseWriter) {
	if s.body == nil {
		s.replayWithoutBody(w)
		return
	}
	s.copyHeader(w.Header())
	w.WriteHeader(s.status)
	if len(s.body) > 0 {
		_, _ = w.Write(s.body) // a client that has gone asks again
	}
}

// replayWithoutBody keeps the status: the request was executed, and a client that reads an error would use
// another key.
func (s *stored) replayWithoutBody(w http.ResponseWriter) {
	s.copyHeader(w.Header())
	for name := range w.Header() {
		if strings.HasPrefix(name, "Content-") || name == "Etag" {
			w.Header().Del(name)
		}
	}
	p := newProblem(s.status, "the request was executed; its response was too large to be stored")
	p.send(w)
}

func (s *stored) copyHeader(to http.Header) {
	var header map[string][]string
	_ = json.Unmarshal([]byte(s.header), &header) // it was written by storedHeader
	for name, values := range header {
		name, _ = url.PathUnescape(name)
		plain := make([]string, len(values))
		for i, v := range values {
			plain[i], _ = url.PathUnescape(v)
		}
		to[name] = plain
	}
	to.Set(ReplayedHeader, "true")
}
