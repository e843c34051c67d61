package catalog

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// compile makes a schema ready for use. A compiler of its own: after an error one has half of a schema.
func (f *files) compile(address string) (*budgeted, error) {
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(f)
	var all []*jsonschema.Schema
	c.RegisterVocabulary(collected(&all))
	c.AssertVocabs()
	schema, err := c.Compile(address)
	if err != nil {
		return nil, err
	}
	const not = catalogURL + "not"
	err = c.AddResource(not, map[string]any{"not": map[string]any{"$ref": address}})
	if err != nil {
		return nil, err
	}
	misfit, err := c.Compile(not)
	if err != nil {
		return nil, err
	}
	return newBudgeted(schema, misfit, all), nil
}

// inlineAddress is that of a schema in a YAML file, which its author does not know.
var inlineAddress = regexp.MustCompile(`^[^#]*![^#]*![0-9]+`)

// schemaText is a compiler's error in one line, without the addresses that stand for the catalogue.
func schemaText(err error) string {
	var invalid *jsonschema.SchemaValidationError
	var regex *jsonschema.InvalidRegexError
	var load *jsonschema.LoadURLError
	var nowhere *jsonschema.JSONPointerNotFoundError
	var text string
	switch inner := (*jsonschema.ValidationError)(nil); {
	case errors.As(err, &regex):
		text = fmt.Sprintf("pattern %q: %v", regex.Regex, regex.Err)
	case errors.As(err, &invalid) && errors.As(invalid.Err, &inner):
		text = schemaFaults(inner)
	case errors.As(err, &load):
		text = fmt.Sprintf("$ref to %s: %v", load.URL, load.Err)
	case errors.As(err, &nowhere):
		text = fmt.Sprintf("$ref to %s leads nowhere", inlineAddress.ReplaceAllString(nowhere.URL, ""))
	default:
		text = err.Error()
	}
	return strings.ReplaceAll(strings.Join(strings.Fields(text), " "), catalogURL, "")
}

// schemaFaults says what of a schema is none. Its author may see the values.
func schemaFaults(err *jsonschema.ValidationError) string {
	var texts []string
	for _, leaf := range leaves(err, nil) {
		text := kindText(leaf.ErrorKind)
		if enum := misspelt(leaf); enum != nil {
			text = fmt.Sprintf("%q is none of %s", fmt.Sprint(enum.Got), list(enum.Want))
		}
		if format, ok := leaf.ErrorKind.(*kind.Format); ok {
			text = fmt.Sprintf("%q is no %s: %v", fmt.Sprint(format.Got), format.Want, format.Err)
		}
		texts = append(texts, fmt.Sprintf("%s: %s", pointer(leaf.InstanceLocation), text))
	}
	return strings.Join(texts[:min(len(texts), mostFaults)], "; ")
}

// misspelt is what a word should have been, such as a type; nil where the fault is another one.
func misspelt(err *jsonschema.ValidationError) *kind.Enum {
	if enum, ok := err.ErrorKind.(*kind.Enum); ok {
		if _, isText := enum.Got.(string); isText {
			return enum
		}
	}
	for _, cause := range err.Causes {
		if enum := misspelt(cause); enum != nil {
			return enum
		}
	}
	return nil
}

func list(values []any) string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = fmt.Sprint(v)
	}
	return strings.Join(texts, ", ")
}

func schemaAdvice(err error) string {
	var load *jsonschema.LoadURLError
	var pointer *jsonschema.JSONPointerNotFoundError
	var anchor *jsonschema.AnchorNotFoundError
	switch {
	case errors.As(err, &load):
		return "refer to $defs of the schema, or to a *.json file of the catalogue by its relative path"
	case errors.As(err, &pointer), errors.As(err, &anchor):
		return "correct the part behind the #"
	case strings.Contains(err.Error(), "regex"):
		return "write the pattern in the syntax of RE2 (https://github.com/google/re2/wiki/Syntax): " +
			"it has no look-ahead and no back-references"
	}
	return "correct it: https://json-schema.org/understanding-json-schema explains JSON Schema 2020-12"
}
