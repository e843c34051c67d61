package idempotency

import (
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// string reads a string with its quotes. A pair of surrogate escapes becomes one code point, a lone one
// stays.
func (p *parser) string() ([]rune, error) {
	runes := []rune{}
	for p.at++; p.at < len(p.text); {
		switch c := p.text[p.at]; {
		case c == '"':
			p.at++
			return runes, nil
		case c < ' ':
			return nil, errNotJSON
		case c == '\\':
			r, ok := p.escape()
			if !ok {
				return nil, errNotJSON
			}
			p.castable = p.castable && r != 0 && !utf16.IsSurrogate(r)
			runes = append(runes, r)
		default:
			r, size := utf8.DecodeRune(p.text[p.at:])
			runes = append(runes, r)
			p.at += size
		}
	}
	return nil, errNotJSON
}

var escapes = map[byte]rune{
	'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
}

func (p *parser) escape() (rune, bool) {
	p.at++
	c := p.peek()
	p.at++
	if c != 'u' {
		r, ok := escapes[c]
		return r, ok
	}
	r, ok := p.hex()
	if !ok || !utf16.IsSurrogate(r) || p.at+1 >= len(p.text) || string(p.text[p.at:p.at+2]) != `\u` {
		return r, ok
	}
	p.at += 2
	low, ok := p.hex()
	if pair := utf16.DecodeRune(r, low); ok && pair != utf8.RuneError {
		return pair, true
	}
	p.at -= 2 // it is the next character, or an error then
	if ok {
		p.at -= 4
	}
	return r, true
}

// hex reads four hexadecimal digits, or none.
func (p *parser) hex() (rune, bool) {
	if p.at+4 > len(p.text) {
		return 0, false
	}
	for _, c := range p.text[p.at : p.at+4] {
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F') {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(string(p.text[p.at:p.at+4]), 16, 16)
	p.at += 4
	return rune(n), err == nil
}

// appendString writes a string in ASCII, as Python's ensure_ascii does.
func appendString(b []byte, runes []rune) []byte {
	b = append(b, '"')
	for _, r := range runes {
		switch {
		case r == '"', r == '\\':
			b = append(b, '\\', byte(r))
		case ' ' <= r && r <= '~':
			b = append(b, byte(r))
		case r > 0xFFFF:
			high, low := utf16.EncodeRune(r)
			b = appendUnicode(appendUnicode(b, high), low)
		default:
			b = appendEscape(b, r)
		}
	}
	return append(b, '"')
}

func appendEscape(b []byte, r rune) []byte {
	switch r {
	case '\b':
		return append(b, `\b`...)
	case '\f':
		return append(b, `\f`...)
	case '\n':
		return append(b, `\n`...)
	case '\r':
		return append(b, `\r`...)
	case '\t':
		return append(b, `\t`...)
	}
	return appendUnicode(b, r)
}

func appendUnicode(b []byte, r rune) []byte {
	const digits = "0123456789abcdef"
	return append(b, '\\', 'u', digits[r>>12&15], digits[r>>8&15], digits[r>>4&15], digits[r&15])
}
