package idempotency

import (
	"math"
	"math/big"
	"strconv"
	"strings"
)

// canonicalJSON is what Python's json.dumps(json.loads(text), sort_keys=True, separators=(',', ':')) returns
// for UTF-8 text, but that a number of which a double is another one stands with all its digits. It fails
// where Python does, and beyond [maxDepth].
func canonicalJSON(text []byte) ([]byte, error) {
	d, err := parseJSON(text)
	if err != nil {
		return nil, err
	}
	return appendValue(nil, d.root), nil
}

func appendValue(b []byte, v value) []byte {
	switch v.kind {
	case '"':
		return appendString(b, v.runes)
	case '[':
		return appendArray(b, v.items)
	case '{':
		return appendObject(b, v.members)
	}
	return append(b, v.text...)
}

func appendArray(b []byte, items []value) []byte {
	b = append(b, '[')
	for i, item := range items {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendValue(b, item)
	}
	return append(b, ']')
}

func appendObject(b []byte, members []member) []byte {
	b = append(b, '{')
	for i, m := range members {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, m.key), ':')
		b = appendValue(b, m.value)
	}
	return append(b, '}')
}

// decimal is the value of a number's text: its sign, its digits without zeros around them, and the power of
// ten. Texts of the same value are equal. A double may have fewer digits.
func decimal(text string) string {
	sign, text := text[:len(text)-len(strings.TrimPrefix(text, "-"))], strings.TrimPrefix(text, "-")
	mantissa, power := text, "0"
	if i := strings.IndexAny(text, "eE"); i >= 0 {
		mantissa, power = text[:i], text[i+1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	short := strings.TrimRight(digits, "0")
	if short == "" {
		return sign + "0"
	}
	exponent, ok := new(big.Int).SetString(power, 10)
	if !ok { // Infinity
		return sign + text
	}
	exponent.Add(exponent, big.NewInt(int64(len(digits)-len(short)-len(fraction))))
	return sign + short + "e" + exponent.String()
}

// reprFloat is Python's repr of a float: the shortest digits that read back as the same number, with a point
// or an exponent always, and an exponent outside of 1e-4 to 1e16.
func reprFloat(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	e := strconv.FormatFloat(f, 'e', -1, 64)
	_, exponent, _ := strings.Cut(e, "e")
	if n, _ := strconv.Atoi(exponent); n < -4 || n >= 16 {
		return e
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
