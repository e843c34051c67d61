package catalog

import (
	"regexp"
	"slices"
	"strings"

	"github.com/walpost/walpost/outbox"
)

// checkRules reports what the entry's name and fields do not keep to.
func (e *Entry) checkRules(f *files, r *report) {
	e.checkName(r)
	e.checkSteps(r)
	for _, one := range f.fields(e.schema) {
		switch _, isBool := one.pii.(bool); {
		case one.pii != nil && !isBool:
			r.breach(e.at(), "catalog-pii", "write x-pii: true or x-pii: false",
				"%s: x-pii of %s is neither true nor false", e, one.path)
		case one.pii == nil && soundsPersonal(one.name):
			r.breach(e.at(), "catalog-pii",
				"add x-pii: true to the property, or x-pii: false where it is not about a person",
				"%s: %s may be personal data, and has no x-pii", e, one.path)
		}
	}
}

func (e *Entry) checkSteps(r *report) {
	if e.compiled == nil { // which is a problem already
		return
	}
	if n := e.compiled.alternatives(); n > 1 {
		r.doubt(e.at(), "catalog-steps", "choose one with if and then, by a value that tells them apart",
			"%s: a schema contains itself in %d alternatives: nested payloads may take too many steps", e, n)
	}
}

// nameForm are names that keep their form in a subject.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

func (e *Entry) checkName(r *report) {
	if !nameForm.MatchString(e.Name) {
		r.breach(e.at(), "catalog-name",
			"write letters, digits, _ and -, and dots between parts, as in order.placed",
			"event type %q cannot stand in a subject", e.Name)
		return
	}
	words := wordsOf(e.Name)
	last := words[len(words)-1]
	switch {
	case last == "updated":
		r.breach(e.at(), "catalog-name", vagueHint,
			"event type %s says only that something was updated", e.Name)
	case len(words) < 3 && slices.Contains(vague, last):
		r.doubt(e.at(), "catalog-name", vagueHint,
			"event type %s does not say what was %s", e.Name, last)
	case !isPast(e.Name):
		r.breach(e.at(), "catalog-name", "name what has happened, in the past tense, as in order.placed",
			"event type %s has no past participle in its last part", e.Name)
	}
}

const vagueHint = "name what has happened, as in order.address_corrected: one event for each fact"

// vague are participles that say nothing without what they are about.
var vague = []string{"changed", "modified", "edited", "processed", "handled"}

// isPast asks package outbox, which knows the participles, about the name in its spelling.
func isPast(name string) bool {
	parts := strings.Split(name, ".")
	last := strings.Join(wordsOf(parts[len(parts)-1]), "_")
	return outbox.CheckEventType("event.x_"+last) == nil
}

// wordsOf are the words of a name in any spelling: order.placed, OrderPlaced, order_placed, order-placed.
func wordsOf(name string) (words []string) {
	word := ""
	flush := func() {
		if word != "" {
			words = append(words, strings.ToLower(word))
		}
		word = ""
	}
	for i := range len(name) {
		c := name[i]
		isUpper := c >= 'A' && c <= 'Z'
		switch {
		case strings.IndexByte("._- ", c) >= 0:
			flush()
			continue
		case isUpper && i > 0 && (isLower(name[i-1]) || i+1 < len(name) && isLower(name[i+1])):
			flush()
		}
		word += string(c)
	}
	flush()
	return words
}

func isLower(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }

// personal are words of names of fields that tend to be about a person.
var personal = strings.Fields(`
	address age avatar bank bic birth birthdate birthday birthplace card city contact device dob email fax
	firstname fullname gender geo iban ip ipv4 ipv6 lastname latitude license location login longitude mail
	maiden mobile name nationality nickname passport passwd password pesel phone photo postal postcode race
	religion salary sex signature ssn street surname tax tel telephone username vat zip zipcode`)

func soundsPersonal(name string) bool {
	return slices.ContainsFunc(wordsOf(name), func(w string) bool { return slices.Contains(personal, w) })
}
