package publish

import (
	"slices"
	"strings"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
)

// Types choose events by type. Each is an event type, or the beginning of some with a *
// that stands for whatever follows, dots too: "order.*" and "ord*" both choose
// order.item.added. None at all choose every event.
type Types []string

// ParseTypes checks them.
func ParseTypes(types []string) (Types, error) {
	for _, t := range types {
		begin, _ := strings.CutSuffix(t, "*")
		switch {
		case t == "":
			return nil, hint.Errorf("leave it out where every type is meant", "an event type is empty")
		case strings.HasSuffix(t, ".>"):
			return nil, hint.Errorf("write "+strings.TrimSuffix(t, ">")+"*",
				"event type %q: * is the wildcard, not >", t)
		case strings.Contains(begin, "*"):
			return nil, hint.Errorf("* stands at the end, as in order.*, for whatever follows",
				"event type %q: * in the middle", t)
		}
	}
	return types, nil
}

// Match reports whether an event type is chosen.
func (t Types) Match(eventType string) bool {
	return len(t) == 0 || slices.ContainsFunc(t, func(one string) bool {
		if begin, open := strings.CutSuffix(one, "*"); open {
			return strings.HasPrefix(eventType, begin)
		}
		return one == eventType
	})
}

// Filters are subjects, without overlaps, among which every event of the types is that was
// published by the template and stored in the stream; others may be among them, too. nil
// is every subject: without types, where the subject does not tell the type, and where
// a stored message has another subject than the published one.
func (t *Template) Filters(c *natsjs.StreamConfig, types Types) []string {
	moved := c.SubjectTransform != nil || c.Mirror != nil || len(c.Sources) > 0
	listens := func(s string) bool { return jetstream.Overlap(s, t.Pattern()) }
	if moved || !slices.ContainsFunc(c.Subjects, listens) {
		return nil
	}
	var filters []string
	for _, one := range types {
		filter, ok := t.filter(one)
		if !ok {
			return nil
		}
		if jetstream.Covers(filters, filter) {
			continue
		}
		filters = slices.DeleteFunc(filters, func(f string) bool {
			return jetstream.Covers([]string{filter}, f)
		})
		if slices.ContainsFunc(filters, func(f string) bool { return jetstream.Overlap(f, filter) }) {
			return nil
		}
		filters = append(filters, filter)
	}
	return filters
}

// filter is the narrowest wildcard that matches every subject of a type.
func (t *Template) filter(one string) (filter string, ok bool) {
	const placeholder = "{event_type}"
	before, _, told := strings.Cut(t.text, placeholder)
	begin, open := strings.CutSuffix(one, "*")
	text := strings.ReplaceAll(t.text, placeholder, begin)
	whole := begin
	if open {
		begin = begin[:strings.LastIndexByte(begin, '.')+1] // whole tokens
		text, whole = before+begin, strings.TrimSuffix(begin, ".")
	}
	if !told || begin != "" && !validTokens([]byte(whole)) {
		return "", false
	}
	tokens := strings.Split(text, ".")
	for i, token := range tokens {
		if strings.Contains(token, "{") {
			tokens[i] = "*"
		}
	}
	if open {
		tokens[len(tokens)-1] = ">"
	}
	return strings.Join(tokens, "."), true
}
