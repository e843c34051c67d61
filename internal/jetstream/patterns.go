package jetstream

import "strings"

// Covers reports whether a stream that listens on the patterns takes a message
// published on the subject.
func Covers(patterns []string, subject string) bool {
	for _, p := range patterns {
		if matches(p, subject) {
			return true
		}
	}
	return false
}

// matches reports whether every subject that s matches is one that the pattern
// matches; a literal s matches itself.
func matches(pattern, s string) bool {
	for {
		p, patternRest, patternMore := strings.Cut(pattern, ".")
		t, rest, more := strings.Cut(s, ".")
		switch {
		case p == ">":
			return true
		case t == ">", p != "*" && p != t, patternMore != more:
			return false
		case !more:
			return true
		}
		pattern, s = patternRest, rest
	}
}

// Overlap reports whether some subject is matched by both patterns.
func Overlap(a, b string) bool {
	for {
		p, aRest, aMore := strings.Cut(a, ".")
		q, bRest, bMore := strings.Cut(b, ".")
		switch {
		case p == ">" || q == ">":
			return true
		case p != q && p != "*" && q != "*", aMore != bMore:
			return false
		case !aMore:
			return true
		}
		a, b = aRest, bRest
	}
}

// meet is a subject that is matched by two patterns that overlap.
func meet(a, b string) string {
	const any = "walpost"
	var tokens []string
	for {
		p, aRest, aMore := strings.Cut(a, ".")
		q, bRest, bMore := strings.Cut(b, ".")
		t := p
		if p == "*" || p == ">" {
			t = q
		}
		if t == "*" || t == ">" {
			t = any
		}
		tokens = append(tokens, t)
		if p == ">" && bMore {
			aRest, aMore = ">", true
		}
		if q == ">" && aMore {
			bRest, bMore = ">", true
		}
		if !aMore || !bMore {
			return strings.Join(tokens, ".")
		}
		a, b = aRest, bRest
	}
}
