package catalog

import (
	"errors"
	"reflect"
	"slices"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// MaxSteps is how many times schemas may be held against values of a payload, and MaxValueSteps how many
// times more for each of its values. Where a schema contains itself in several alternatives, each level of a
// payload doubles the steps or more.
const (
	MaxSteps      = 10_000
	MaxValueSteps = 5
)

// mostErrors is about how many bytes the errors of a payload may have.
const mostErrors = 16 << 20

// budgeted is a schema whose checks end. One payload is checked at a time.
type budgeted struct {
	mu     sync.Mutex
	schema *jsonschema.Schema
	misfit *jsonschema.Schema // not schema: it collects no errors
	all    []*jsonschema.Schema
	left   int // steps
	// names are those of members that the schemas have.
	names map[string]bool
}

// newBudgeted makes every check of a schema, and of those that it leads to, take a step.
func newBudgeted(schema, misfit *jsonschema.Schema, all []*jsonschema.Schema) *budgeted {
	b := &budgeted{schema: schema, misfit: misfit, all: all, names: map[string]bool{}}
	for _, s := range all {
		s.Format = b.counting(s.Format)
		for name := range s.Properties {
			b.names[name] = true
		}
		for _, name := range s.Required {
			b.names[name] = true
		}
	}
	return b
}

var errSteps = errors.New("no steps are left")

// counting is a format that takes a step. It comes before everything that leads to other schemas, and what it
// fails at leads to none.
func (b *budgeted) counting(format *jsonschema.Format) *jsonschema.Format {
	f := &jsonschema.Format{Validate: func(value any) error {
		if b.left--; b.left < 0 {
			return errSteps
		}
		if format == nil {
			return nil
		}
		return format.Validate(value)
	}}
	if format != nil {
		f.Name = format.Name
	}
	return f
}

// check holds the schema against a payload.
func (b *budgeted) check(value any, size size) []Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	most := MaxSteps + MaxValueSteps*size.values
	b.left = most
	fits := b.misfit.Validate(value) != nil
	switch {
	case b.left < 0:
		return []Fault{*faultf("it takes more than %d steps to check", most)}
	case fits:
		return nil
	}
	b.left = min(most, mostErrors/(256+40*size.depth)) // an error has its path
	err := b.schema.Validate(value)
	if b.left < 0 {
		return []Fault{*faultf("it does not fit, and it takes too long to say where")}
	}
	return faultsOf(err, value, b.names)
}

// collected is a vocabulary without keywords, by which a compiler hands over every schema that it makes.
func collected(all *[]*jsonschema.Schema) *jsonschema.Vocabulary {
	return &jsonschema.Vocabulary{
		URL: catalogURL + "collected",
		Compile: func(c *jsonschema.CompilerContext, _ map[string]any) (jsonschema.SchemaExt, error) {
			*all = append(*all, c.Enqueue(nil))
			return nil, nil
		},
	}
}

// alternatives is the largest number of alternatives in which one of the schemas contains itself. Those that
// an if chooses do not count.
func (b *budgeted) alternatives() (most int) {
	for _, s := range b.all {
		n := 0
		for _, branch := range slices.Concat(s.AllOf, s.AnyOf, s.OneOf) {
			if branch.If == nil && leads(branch, s, map[*jsonschema.Schema]bool{}) {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// leads reports whether a schema refers to another one, or contains one that does.
func leads(from, to *jsonschema.Schema, seen map[*jsonschema.Schema]bool) bool {
	if from == to {
		return true
	}
	if seen[from] {
		return false
	}
	seen[from] = true
	for v, i := reflect.ValueOf(*from), 0; i < v.NumField(); i++ {
		if v.Type().Field(i).IsExported() && leadsIn(v.Field(i), to, seen) {
			return true
		}
	}
	return false
}

// leadsIn is leads for a field of a schema.
func leadsIn(v reflect.Value, to *jsonschema.Schema, seen map[*jsonschema.Schema]bool) bool {
	switch v.Kind() {
	case reflect.Interface:
		return leadsIn(v.Elem(), to, seen)
	case reflect.Slice:
		for i := range v.Len() {
			if leadsIn(v.Index(i), to, seen) {
				return true
			}
		}
	case reflect.Map:
		for each := v.MapRange(); each.Next(); {
			if leadsIn(each.Value(), to, seen) {
				return true
			}
		}
	case reflect.Pointer:
		switch s := v.Interface().(type) {
		case *jsonschema.Schema:
			return s != nil && leads(s, to, seen)
		case *jsonschema.DynamicRef:
			return s != nil && leads(s.Ref, to, seen)
		}
	}
	return false
}
