package idempotency

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Header is the request's header with the key.
const Header = "Idempotency-Key"

const maxKey = 255

// readKey returns the key, or "" where the request has none. Two headers, even equal ones, are no key: a
// proxy and the server could take one each.
func readKey(r *http.Request) (key string, err *problem) {
	values := r.Header.Values(Header)
	if len(values) == 0 {
		return "", nil
	}
	if len(values) > 1 {
		return "", newProblem(http.StatusBadRequest, "the request has several Idempotency-Key headers")
	}
	key = values[0]
	hidden := func(c rune) bool { return c <= ' ' || c > '~' }
	if key == "" || len(key) > maxKey || strings.ContainsFunc(key, hidden) {
		return "", newProblem(http.StatusBadRequest,
			"Idempotency-Key must be 1 to 255 visible ASCII characters")
	}
	return key, nil
}

// scopeOf names what the key is for, so that one key for two resources is two keys: method and path, to be
// read, and a hash of principal, method, path and query, which counts. It is short, whatever the path's
// length.
func scopeOf(principal string, r *http.Request) string {
	path, query := target(r)
	h := sha256.New()
	for _, s := range []string{principal, r.Method, path, sortQuery(query)} {
		hashText(h, s)
	}
	return r.Method + " " + path[:min(len(path), maxKey)] + " " + hex.EncodeToString(h.Sum(nil))
}

// target is the escaped path and the query as the client sent them. A handler such as [http.StripPrefix] in
// front of the middleware changes r.URL, and two resources could look alike there.
func target(r *http.Request) (path, query string) {
	u := r.URL
	if sent, err := url.ParseRequestURI(r.RequestURI); err == nil {
		u = sent
	}
	return u.EscapedPath(), u.RawQuery
}

// sortQuery sorts parameters by name. Those of one name keep their order, which may have a meaning.
func sortQuery(query string) string {
	parameters := strings.Split(query, "&")
	slices.SortStableFunc(parameters, func(a, b string) int {
		a, _, _ = strings.Cut(a, "=")
		b, _, _ = strings.Cut(b, "=")
		return strings.Compare(a, b)
	})
	return strings.Join(parameters, "&")
}
