package console

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/walpost/walpost/internal/hint"
)

// refusal is an error with the HTTP status that it is answered with.
type refusal struct {
	status int
	error
}

func (e *refusal) Unwrap() error { return e.error }

func refuse(status int, advice, format string, args ...any) error {
	return &refusal{status, hint.Errorf(advice, format, args...)}
}

func badRequest(advice, format string, args ...any) error {
	return refuse(http.StatusBadRequest, advice, format, args...)
}

// answer writes a value as JSON, or an error.
func answer(w http.ResponseWriter, value any, err error) {
	status := http.StatusOK
	if err != nil {
		status = http.StatusBadGateway // a server that the console has asked
		var refused *refusal
		if errors.As(err, &refused) {
			status = refused.status
		}
		value = map[string]string{"error": hint.OneLine(err.Error()), "hint": hint.OneLine(hint.Of(err))}
	}
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"error":"encode the answer","hint":""}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client has gone: nothing to tell anybody
}

// mostBody bounds a request: a thousand ids take a few kilobytes.
const mostBody = 256 << 10

// readBody reads the one JSON object of a request.
func readBody(w http.ResponseWriter, r *http.Request, into any) error {
	body := http.MaxBytesReader(w, r.Body, mostBody)
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more follows the first object")
		}
	}
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return refuse(http.StatusRequestEntityTooLarge, "send several requests",
			"the request is larger than %d KiB", mostBody>>10)
	case err != nil:
		return badRequest("send one JSON object, as docs/CONSOLE.md has it",
			"read the request: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}
