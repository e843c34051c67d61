package idempotency

import (
	"errors"
	"slices"
	"strconv"
	"unicode/utf8"
)

// maxDepth is how deeply arrays and objects may be nested. Python refuses about 1,000 levels.
const maxDepth = 900

// maxDigits is how many digits of an integer Python converts.
const maxDigits = 4300

var errNotJSON = errors.New("not JSON as Python reads it")

// document is a parsed JSON text.
type document struct {
	root value
	// castable: jsonb holds it, too. It has no NaN, no \u0000, no lone surrogate and no number beyond
	// numeric.
	castable bool
}

// value is a scalar in canonical form, an array or an object. Scalars are ASCII.
type value struct {
	kind    byte // '"', '[', '{', or 0 for a scalar whose text is final
	text    string
	runes   []rune // of a string; surrogates stand for themselves
	items   []value
	members []member // of an object, sorted by key, each key once
}

type member struct {
	key   []rune
	value value
}

// parser reads what Python's json.loads takes: beside JSON also NaN, Infinity and -Infinity. It is total: no
// input makes it panic, and its depth is bounded.
type parser struct {
	text     []byte
	at       int
	depth    int
	castable bool
}

func parseJSON(text []byte) (document, error) {
	if !utf8.Valid(text) {
		return document{}, errNotJSON
	}
	p := parser{text: text, castable: true}
	p.space()
	root, err := p.value()
	if err != nil {
		return document{}, err
	}
	if p.space(); p.at != len(p.text) {
		return document{}, errNotJSON
	}
	return document{root: root, castable: p.castable}, nil
}

// peek is the next byte, or 0 at the end. A zero byte in the text begins nothing that is valid.
func (p *parser) peek() byte {
	if p.at < len(p.text) {
		return p.text[p.at]
	}
	return 0
}

func (p *parser) skip(c byte) bool {
	if p.peek() != c || p.at == len(p.text) {
		return false
	}
	p.at++
	return true
}

func (p *parser) space() {
	for c := p.peek(); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = p.peek() {
		p.at++
	}
}

func (p *parser) value() (value, error) {
	switch c := p.peek(); {
	case c == '"':
		runes, err := p.string()
		return value{kind: '"', runes: runes}, err
	case c == '[':
		return p.nested(p.array)
	case c == '{':
		return p.nested(p.object)
	case c == '-' && p.at+1 < len(p.text) && p.text[p.at+1] != 'I', '0' <= c && c <= '9':
		return p.number()
	}
	return p.constant()
}

func (p *parser) nested(read func() (value, error)) (value, error) {
	if p.depth++; p.depth > maxDepth {
		return value{}, errNotJSON
	}
	p.at++
	v, err := read()
	p.depth--
	return v, err
}

func (p *parser) constant() (value, error) {
	for _, word := range []string{"null", "true", "false", "NaN", "Infinity", "-Infinity"} {
		if end := p.at + len(word); end <= len(p.text) && string(p.text[p.at:end]) == word {
			p.at = end
			p.castable = p.castable && word[0] >= 'a'
			return value{text: word}, nil
		}
	}
	return value{}, errNotJSON
}

func (p *parser) array() (value, error) {
	v := value{kind: '['}
	if p.space(); p.skip(']') {
		return v, nil
	}
	for {
		p.space()
		item, err := p.value()
		if err != nil {
			return v, err
		}
		v.items = append(v.items, item)
		if p.space(); p.skip(']') {
			return v, nil
		}
		if !p.skip(',') {
			return v, errNotJSON
		}
	}
}

func (p *parser) object() (value, error) {
	v := value{kind: '{'}
	if p.space(); p.skip('}') {
		return v, nil
	}
	for {
		m, err := p.member()
		if err != nil {
			return v, err
		}
		v.members = append(v.members, m)
		if p.space(); p.skip('}') {
			v.members = lastOfEach(v.members)
			return v, nil
		}
		if !p.skip(',') {
			return v, errNotJSON
		}
	}
}

func (p *parser) member() (m member, err error) {
	if p.space(); p.peek() != '"' {
		return m, errNotJSON
	}
	if m.key, err = p.string(); err != nil {
		return m, err
	}
	if p.space(); !p.skip(':') {
		return m, errNotJSON
	}
	p.space()
	m.value, err = p.value()
	return m, err
}

// lastOfEach sorts members by the code points of their keys, and keeps the last of each key.
func lastOfEach(members []member) []member {
	slices.SortStableFunc(members, func(a, b member) int { return slices.Compare(a.key, b.key) })
	kept := members[:0]
	for i, m := range members {
		if i+1 == len(members) || !slices.Equal(m.key, members[i+1].key) {
			kept = append(kept, m)
		}
	}
	return kept
}

// number tells int and float apart, as Python does: 1.0 is not 1.
func (p *parser) number() (value, error) {
	start := p.at
	p.skip('-')
	whole := p.at
	if !p.skip('0') {
		p.digits()
	}
	digits := p.at - whole
	float := p.fraction()
	float = p.exponent() || float
	text := string(p.text[start:p.at])
	switch {
	case digits == 0:
		return value{}, errNotJSON
	case float:
		p.castable = p.castable && digits <= maxDigits
		f, _ := strconv.ParseFloat(text, 64) // out of range is infinite, as in Python
		repr := reprFloat(f)
		if exact := decimal(text); exact != decimal(repr) {
			return value{text: exact}, nil
		}
		return value{text: repr}, nil
	case digits > maxDigits:
		return value{}, errNotJSON
	case text == "-0":
		text = "0"
	}
	return value{text: text}, nil
}

func (p *parser) digits() (n int) {
	for c := p.peek(); '0' <= c && c <= '9'; c = p.peek() {
		p.at++
		n++
	}
	return n
}

// fraction takes a point with digits. A point without them is left, and then no text goes on with it.
func (p *parser) fraction() bool {
	start := p.at
	n := 0
	if p.skip('.') {
		n = p.digits()
	}
	if n == 0 {
		p.at = start
	}
	p.castable = p.castable && n <= maxDigits
	return n > 0
}

func (p *parser) exponent() bool {
	start := p.at
	n := 0
	if p.skip('e') || p.skip('E') {
		if !p.skip('+') {
			p.skip('-')
		}
		n = p.digits()
	}
	if n == 0 {
		p.at = start
	}
	p.castable = p.castable && n <= 4
	return n > 0
}
