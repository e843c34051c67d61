package publish

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// addColumns writes the columns that become headers. A document becomes one for each key: texts as they are,
// other values as JSON, null none.
func (e *Envelope) addColumns(ev *outbox.Event) error {
	layout := &ev.Table.Layout
	for i := range outbox.MaxHeaders {
		f := outbox.FirstHeader + outbox.Field(i)
		if !layout.Has(f) {
			break
		}
		v, name := ev.Values[f], layout.Headers[i]
		if v == nil {
			continue
		}
		if !ev.Table.JSON[f] {
			key := ""
			if name == "" {
				name, key = outbox.HeaderPrefix, layout.Columns[f]
			}
			e.addColumn(name, key, v)
			continue
		}
		if name == "" {
			name = outbox.HeaderPrefix
		}
		if err := e.addDocument(name, v); err != nil {
			return rowErrorf(outbox.RowHeaders, "column %+q: %v", layout.Columns[f], err)
		}
	}
	return nil
}

func (e *Envelope) addDocument(prefix string, document []byte) error {
	var values map[string]json.RawMessage
	if err := json.Unmarshal(document, &values); err != nil {
		return fmt.Errorf("headers are a JSON object: %s", excerpt(document[:min(len(document), 32)]))
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := []byte(values[key])
		var text string
		switch {
		case string(value) == "null":
			continue
		case json.Unmarshal(value, &text) == nil:
			value = []byte(text)
		default:
			var compact bytes.Buffer
			if err := json.Compact(&compact, value); err == nil {
				value = compact.Bytes()
			}
		}
		e.addColumn(prefix, key, value)
	}
	return nil
}

// addColumn writes a header whose name has two parts. The row or the table gives the second one, so it is
// encoded.
func (e *Envelope) addColumn(prefix, key string, value []byte) {
	h := e.headers
	h.start = len(h.block)
	h.block = append(h.block, prefix...)
	for i, part := range strings.Split(key, ":") {
		if i > 0 {
			h.block = append(h.block, "%3A"...)
		}
		h.block = appendPercent(h.block, part)
	}
	h.block = append(h.block, ": "...)
	h.value = len(h.block)
	h.block = appendPercent(h.block, value)
	h.close()
}

// reservedHeaders are names, and what names begin with that end in a hyphen.
var reservedHeaders = []string{"nats-", "walpost-", "ce-", "traceparent", "content-type"}

// CheckHeaderName reports why a column may not become a header of this name, or, where it is a document, its
// keys headers with this prefix.
func CheckHeaderName(name string) error {
	odd := func(r rune) bool { return r <= ' ' || r > '~' || r == ':' }
	if name == "" || strings.ContainsFunc(name, odd) {
		return hint.Errorf("write visible ASCII without a colon, as in X-Tenant",
			"%q is no name of a header", name)
	}
	lower := strings.ToLower(name)
	for _, r := range reservedHeaders {
		if strings.HasPrefix(r, lower) || strings.HasSuffix(r, "-") && strings.HasPrefix(lower, r) {
			return hint.Errorf(fmt.Sprintf("choose another name, as in %s%s", outbox.HeaderPrefix, name),
				"header %q is, or may become, one of walpost's or JetStream's own (%s)", name, r)
		}
	}
	return nil
}
