package main

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// nodeValue is a value that a file may write as a mapping or a list.
type nodeValue interface {
	value
	setNode(n *yaml.Node) error
	// isNode reports whether the present value is written so.
	isNode() bool
}

// pairs are the keys and values of a mapping of scalars, in its order.
func pairs(n *yaml.Node) (all [][2]string, err error) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], resolve(n.Content[i+1])
		if v.Kind != yaml.ScalarNode || isNull(v) {
			return nil, fmt.Errorf("%s has no single value", k.Value)
		}
		all = append(all, [2]string{k.Value, v.Value})
	}
	return all, nil
}

// textPairs are those of a text as in a=1,b=2. A part without a value has "".
func textPairs(text string) (all [][2]string) {
	for part := range strings.SplitSeq(text, ",") {
		k, v, _ := strings.Cut(part, "=")
		all = append(all, [2]string{strings.TrimSpace(k), strings.TrimSpace(v)})
	}
	return all
}

type markValue struct{ p *MarkConfig }

// otherStates are those that stand beside the delivered one.
var otherStates = map[string]outbox.State{"failed": outbox.Failed, "dead": outbox.Dead}

const statusForm = "write {set: {status: 2}}, or {set: {status: 2}, failed: 3, dead: 4}"

func (v markValue) Kind() string { return "update | delete | journal | {set: {column: value}}" }
func (v markValue) isNode() bool { return v.p.Column != "" }

func (v markValue) Set(text string) error {
	if !strings.Contains(text, "=") {
		*v.p = MarkConfig{Name: text}
		return nil
	}
	all := textPairs(text)
	return v.set(all[:1], all[1:])
}

func (v markValue) setNode(n *yaml.Node) error {
	if n.Kind != yaml.MappingNode {
		return hint.Errorf(statusForm, "a list is no mark")
	}
	var set *yaml.Node
	rest := &yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == "set" {
			set = resolve(n.Content[i+1])
			continue
		}
		rest.Content = append(rest.Content, n.Content[i:i+2]...)
	}
	if set == nil || set.Kind != yaml.MappingNode {
		return hint.Errorf(statusForm, "a mark sets a column")
	}
	column, err := pairs(set)
	if err != nil {
		return err
	}
	others, err := pairs(rest)
	if err != nil {
		return err
	}
	return v.set(column, others)
}

func (v markValue) set(column, others [][2]string) error {
	if len(column) != 1 {
		return hint.Errorf(statusForm, "a mark sets one column, not %d", len(column))
	}
	m := MarkConfig{Name: string(outbox.MarkUpdate), Column: column[0][0]}
	m.States[outbox.Done] = column[0][1]
	for _, pair := range others {
		state, ok := otherStates[pair[0]]
		if !ok {
			return hint.Errorf(statusForm, "%q is neither failed nor dead", pair[0])
		}
		if m.States[state] != "" {
			return fmt.Errorf("%s is given twice", pair[0])
		}
		m.States[state] = pair[1]
	}
	*v.p = m
	return nil
}

func (v markValue) String() string {
	m := v.p
	if m.Column == "" {
		return m.Name
	}
	text := fmt.Sprintf("{set: {%s: %s}", scalar(m.Column), scalar(m.States[outbox.Done]))
	for _, name := range []string{"failed", "dead"} {
		if state := m.States[otherStates[name]]; state != "" {
			text += fmt.Sprintf(", %s: %s", name, scalar(state))
		}
	}
	return text + "}"
}

func (v markValue) Check() error {
	m := v.p
	if m.Column == "" {
		return v.checkName()
	}
	done, failed, dead := m.States[outbox.Done], m.States[outbox.Failed], m.States[outbox.Dead]
	switch {
	case done == "":
		return hint.Errorf(statusForm, "column %q has no value for delivered rows", m.Column)
	case failed != "" && dead == "":
		return hint.Errorf(statusForm, "failed needs dead: the status of a row that has failed too often")
	case done == failed || done == dead || failed != "" && failed == dead:
		return hint.Errorf("give each state a value of its own", "two states have the same value")
	}
	return nil
}

func (v markValue) checkName() error {
	names := []string{"update", "delete", "journal"}
	switch {
	case slices.Contains(names, v.p.Name):
		return nil
	case strings.EqualFold(v.p.Name, "none"):
		return hint.Errorf("drop the DELETE in the producer (Quarkus: "+
			"quarkus.debezium-outbox.remove-after-insert=false), then set mark: delete or journal: "+
			"docs/TABLES.md#producers-that-delete-their-rows",
			"mark none does not exist: a row stays in its table until it is marked")
	}
	advice := didYouMean(v.p.Name, names)
	if advice == "" {
		advice = "to set a status, " + statusForm
	}
	return hint.Errorf(advice, "%q is not one of %s", v.p.Name, v.Kind())
}

type headersValue struct{ p *HeadersConfig }

func (v headersValue) Kind() string { return "list of columns | map from column to header" }
func (v headersValue) isNode() bool { return v.p.Set }

func (v headersValue) Set(text string) error {
	switch text {
	case "":
		*v.p = HeadersConfig{}
	case "[]":
		*v.p = HeadersConfig{Set: true}
	default:
		v.set(textPairs(text))
	}
	return nil
}

func (v headersValue) setNode(n *yaml.Node) error {
	if n.Kind == yaml.MappingNode {
		all, err := pairs(n)
		if err == nil {
			v.set(all)
		}
		return err
	}
	var all [][2]string
	for _, item := range n.Content {
		if item = resolve(item); item.Kind != yaml.ScalarNode || isNull(item) {
			return hint.Errorf("write [message_id, tenant], or {message_id: Message-Id}",
				"an item of the list is no column's name")
		}
		all = append(all, [2]string{item.Value})
	}
	v.set(all)
	return nil
}

func (v headersValue) set(all [][2]string) {
	*v.p = HeadersConfig{Set: true}
	for _, pair := range all {
		v.p.List = append(v.p.List, outbox.Header{Column: pair[0], Name: pair[1]})
	}
}

// String is a list, or a map where a header has a name of its own.
func (v headersValue) String() string {
	if !v.p.Set {
		return ""
	}
	var columns, all []string
	named := false
	for _, h := range v.p.List {
		columns = append(columns, scalar(h.Column))
		all = append(all, scalar(h.Column)+": "+scalar(h.Name))
		named = named || h.Name != ""
	}
	if named {
		return "{" + strings.Join(all, ", ") + "}"
	}
	return "[" + strings.Join(columns, ", ") + "]"
}

func (v headersValue) Check() error {
	if n := len(v.p.List); n > outbox.MaxHeaders {
		return hint.Errorf("put what belongs together into one jsonb column",
			"%d columns, and at most %d can become headers", n, outbox.MaxHeaders)
	}
	seen := map[string]bool{}
	for _, h := range v.p.List {
		switch {
		case h.Column == "":
			return hint.Errorf("write [message_id, tenant], or {message_id: Message-Id}",
				"a column has no name")
		case seen[h.Column]:
			return fmt.Errorf("column %q is given twice", h.Column)
		case h.Name != "":
			if err := publish.CheckHeaderName(h.Name); err != nil {
				return err
			}
		}
		seen[h.Column] = true
	}
	return nil
}
