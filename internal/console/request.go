package console

import (
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"
)

// number is a parameter of the query between two limits, or its default.
func number(r *http.Request, name string, initial, least, most int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return initial, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > most {
		return 0, badRequest("give a whole number from "+strconv.FormatInt(least, 10)+" to "+
			strconv.FormatInt(most, 10), "%s: %q is no such number", name, cut(text, 100))
	}
	return n, nil
}

// pathID is the {id} of the path.
func pathID(r *http.Request) (int64, error) {
	text := r.PathValue("id")
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id < 1 || strconv.FormatInt(id, 10) != text {
		return 0, badRequest("the lists show the numbers", "%q is not a number of one", cut(text, 100))
	}
	return id, nil
}

// cut shortens a text for an error.
func cut(text string, most int) string {
	if len(text) > most {
		return text[:most] + "..."
	}
	return text
}

// mostText bounds a text of the query: nothing that a filter names is longer.
const mostText = 1024

// text is a parameter of the query that a statement gets.
func text(r *http.Request, name string) (string, error) {
	value := r.URL.Query().Get(name)
	if len(value) > mostText || !utf8.ValidString(value) || strings.ContainsRune(value, 0) {
		return "", badRequest("give up to 1024 bytes of UTF-8 without a NUL", "%s cannot be looked for", name)
	}
	return value, nil
}
