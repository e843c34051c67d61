package catalog

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/walpost/walpost/outbox"
)

// ErrUnknown means that the catalogue has no such event type, or not this version of it.
var ErrUnknown = errors.New("the catalogue does not have it")

// PayloadError says why a payload does not fit its schema.
type PayloadError struct {
	EventType string
	Version   int
	Faults    []Fault // at least one, and not all of many
}

// Fault is one reason.
type Fault struct {
	// Path is a JSON Pointer into the payload, as in "/items/0/sku"; "" is all of it.
	Path string
	// Text never has a value of the payload: it may be personal. It is printable ASCII.
	Text string

	// discreet is both without names of members that the schema does not have: they may be personal, too.
	discreet string
}

func (e *PayloadError) Error() string {
	return e.text(func(f Fault) string { return told(f.Path, f.Text) })
}

// discreet is the error for those who may not read payloads.
func (e *PayloadError) discreet() string {
	return e.text(func(f Fault) string { return cmp.Or(f.discreet, told(f.Path, f.Text)) })
}

func (e *PayloadError) text(of func(Fault) string) string {
	var faults []string
	for _, f := range e.Faults {
		faults = append(faults, of(f))
	}
	return fmt.Sprintf("%s version %d: %s", printable(e.EventType), e.Version, strings.Join(faults, "; "))
}

func told(path, text string) string { return cmp.Or(path, "the payload") + ": " + text }

// Validate checks a payload against the schema of its event type and version; version 0 means 1. Its error is
// a [*PayloadError], or wraps [ErrUnknown].
//
// Numbers are compared exactly. The keyword format is an annotation, as JSON Schema 2020-12 has it by
// default: write a pattern where a text has to have a form. [MaxDepth], [MaxValues], [MaxNumber] and
// [MaxSteps] hold for every payload.
func (c *Catalog) Validate(eventType string, version int, payload []byte) error {
	e := c.Find(eventType, version)
	if e == nil {
		return c.unknown(eventType, version)
	}
	if faults := check(e.compiled, payload); len(faults) > 0 {
		return &PayloadError{e.Name, e.Version, faults}
	}
	return nil
}

func (c *Catalog) unknown(eventType string, version int) error {
	if c.Knows(eventType) {
		return fmt.Errorf("%+q version %d: %w", eventType, cmp.Or(version, 1), ErrUnknown)
	}
	return fmt.Errorf("%+q: %w", eventType, ErrUnknown)
}

// CheckMessage is [Catalog.Validate] for [github.com/walpost/walpost/outbox.Inserter.Check]. It refuses event
// types and versions that the catalogue does not have: let those pass where errors.Is says [ErrUnknown].
func (c *Catalog) CheckMessage(m outbox.Message) error {
	return c.Validate(m.EventType, int(m.EventVersion), m.Payload)
}

func check(schema *budgeted, payload []byte) []Fault {
	size, f := checkLimits(payload)
	if f != nil {
		return []Fault{*f}
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(payload))
	if err != nil {
		return []Fault{{Text: "it is not JSON"}}
	}
	return schema.check(value, size)
}

// mostFaults is how many faults an error names.
const mostFaults = 3

// faultsOf tells what is wrong with a value. The schema has the known names.
func faultsOf(err error, value any, known map[string]bool) (faults []Fault) {
	if err == nil {
		return nil
	}
	var invalid *invalidity
	if !errors.As(err, &invalid) {
		return []Fault{{Text: "it cannot be checked"}}
	}
	all := leaves(invalid, nil)
	slices.SortStableFunc(all, func(a, b *invalidity) int {
		return slices.Compare(a.InstanceLocation, b.InstanceLocation)
	})
	for _, leaf := range all[:min(len(all), mostFaults)] {
		text := kindText(leaf.ErrorKind)
		discreet := text
		if k, ok := leaf.ErrorKind.(*kind.AdditionalProperties); ok {
			discreet = fmt.Sprintf("the schema does not allow %d of its members", len(k.Properties))
		}
		faults = append(faults, Fault{
			Path: pointer(leaf.InstanceLocation), Text: text,
			discreet: told(pointer(discreetPath(leaf.InstanceLocation, value, known)), discreet),
		})
	}
	if more := len(all) - mostFaults; more > 0 {
		and := fmt.Sprintf(" (and %d more)", more)
		faults[mostFaults-1].Text += and
		faults[mostFaults-1].discreet += and
	}
	return faults
}

type invalidity = jsonschema.ValidationError

// leaves are the errors that no other one explains. The branches of anyOf and oneOf are not among them: all
// but one are beside the point.
func leaves(err *invalidity, all []*invalidity) []*invalidity {
	switch err.ErrorKind.(type) {
	case *kind.AnyOf, *kind.OneOf:
		return append(all, err)
	}
	if len(err.Causes) == 0 {
		return append(all, err)
	}
	for _, cause := range err.Causes {
		all = leaves(cause, all)
	}
	return all
}

// discreetPath has a star in place of each name that the schema does not have.
func discreetPath(tokens []string, value any, known map[string]bool) []string {
	path := slices.Clone(tokens)
	for i, token := range tokens {
		switch in := value.(type) {
		case map[string]any:
			if value = in[token]; !known[token] {
				path[i] = "*"
			}
		case []any:
			n, err := strconv.Atoi(token)
			if value = nil; err == nil && n >= 0 && n < len(in) {
				value = in[n]
			}
		default:
			path[i] = "*"
		}
	}
	return path
}

var pointerEscapes = strings.NewReplacer("~", "~0", "/", "~1")

// pointer has names of the row in it.
func pointer(tokens []string) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString("/" + pointerEscapes.Replace(printable(t)))
	}
	return cut(b.String(), 200)
}

// printable is a name of a row as an error can have it.
func printable(name string) string {
	quoted := fmt.Sprintf("%+q", cut(name, 60))
	return quoted[1 : len(quoted)-1]
}

func cut(s string, most int) string {
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// kindText says what the schema wants. It names no value of the instance.
func kindText(k jsonschema.ErrorKind) string {
	switch k := k.(type) {
	case *kind.Type:
		return fmt.Sprintf("%s instead of %s", k.Got, strings.Join(k.Want, " or "))
	case *kind.Required:
		return "without " + names(k.Missing)
	case *kind.AdditionalProperties:
		return "the schema does not allow " + names(k.Properties)
	case *kind.FalseSchema:
		return "the schema does not allow it"
	case *kind.Enum:
		return "none of the values of enum"
	case *kind.Const:
		return "not the value of const"
	case *kind.Pattern:
		return fmt.Sprintf("it does not match the pattern %+q", cut(k.Want, 80))
	case *kind.Format:
		return fmt.Sprintf("it is no %s", printable(k.Want))
	case *kind.AnyOf:
		return "it fits none of anyOf"
	case *kind.OneOf:
		return "it does not fit exactly one of oneOf"
	case *kind.Not:
		return "it fits the schema of not"
	}
	if path := k.KeywordPath(); len(path) > 0 {
		return "it does not fit " + printable(path[0])
	}
	return "it does not fit"
}

func names(all []string) string {
	all = slices.Sorted(slices.Values(all))
	var quoted []string
	for _, name := range all[:min(len(all), mostFaults)] {
		quoted = append(quoted, printable(name))
	}
	text := strings.Join(quoted, ", ")
	if more := len(all) - mostFaults; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
