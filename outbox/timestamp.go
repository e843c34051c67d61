package outbox

import (
	"fmt"
	"time"
)

// ParseTimestamp reads PostgreSQL's ISO rendering of a timestamptz,
// "2026-11-20 10:17:35.043443+00". The walsender and every session of the relay
// are told to render ISO in UTC, but any offset is understood. A timestamp
// without time zone is taken as UTC. "infinity" is later than all that
// PostgreSQL can store; "-infinity" is the zero time, and so is any year BC.
func ParseTimestamp(b []byte) (time.Time, error) {
	switch string(b) {
	case "infinity":
		return time.Unix(1<<55, 0), nil
	case "-infinity":
		return time.Time{}, nil
	}
	t, ok := parseISO(b)
	if !ok {
		const want = "YYYY-MM-DD HH:MM:SS[.ffffff][+HH[:MM[:SS]]][ BC]"
		return time.Time{}, fmt.Errorf("parse timestamp %q: want %s", b, want)
	}
	return t, nil
}

func parseISO(b []byte) (time.Time, bool) {
	p := digits{b: b}
	year := p.number(4, 6)
	p.byte('-')
	month := p.number(2, 2)
	p.byte('-')
	day := p.number(2, 2)
	p.byte(' ')
	hour := p.number(2, 2)
	p.byte(':')
	minute := p.number(2, 2)
	p.byte(':')
	second := p.number(2, 2)
	nanos := p.fraction()
	offset := p.offset()
	if p.bad || year == 0 {
		return time.Time{}, false
	}
	bc := string(p.b) == " BC"
	if bc {
		year, p.b = 1-year, nil
	}
	t := time.Date(year, time.Month(month), day, hour, minute, second, nanos, time.UTC)
	// time.Date takes a 31st of November for the 1st of December.
	same := t.Month() == time.Month(month) && t.Day() == day &&
		t.Hour() == hour && t.Minute() == minute && t.Second() == second
	if bc {
		return time.Time{}, same
	}
	return t.Add(-time.Duration(offset) * time.Second), same && len(p.b) == 0
}

// digits is a cursor over a timestamp; bad is set once and stays.
type digits struct {
	b   []byte
	bad bool
}

func (p *digits) number(least, most int) int {
	n, i := 0, 0
	for i < len(p.b) && i < most && p.b[i] >= '0' && p.b[i] <= '9' {
		n = n*10 + int(p.b[i]-'0')
		i++
	}
	if i < least {
		p.bad = true
	}
	p.b = p.b[i:]
	return n
}

func (p *digits) byte(c byte) {
	if !p.has(c) {
		p.bad = true
	}
}

func (p *digits) has(c byte) bool {
	if len(p.b) == 0 || p.b[0] != c {
		return false
	}
	p.b = p.b[1:]
	return true
}

func (p *digits) fraction() int {
	if !p.has('.') {
		return 0
	}
	before := len(p.b)
	n := p.number(1, 6)
	for range 9 - (before - len(p.b)) {
		n *= 10
	}
	return n
}

func (p *digits) offset() int {
	sign := 1
	switch {
	case p.has('+'):
	case p.has('-'):
		sign = -1
	default:
		return 0
	}
	hours, minutes, seconds := p.number(2, 2), 0, 0
	if p.has(':') {
		minutes = p.number(2, 2)
		if p.has(':') {
			seconds = p.number(2, 2)
		}
	}
	if hours > 15 || minutes > 59 || seconds > 59 { // PostgreSQL's limits
		p.bad = true
	}
	return sign * (hours*3600 + minutes*60 + seconds)
}
