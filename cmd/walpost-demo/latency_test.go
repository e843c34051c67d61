package main

import (
	"testing"
	"time"
)

func TestPercentiles(t *testing.T) {
	var l latency
	if p := l.percentiles(); p != (percentiles{}) {
		t.Errorf("of nothing: %+v", p)
	}
	for i := range 1000 {
		l.observe(time.Duration(i+1) * 10 * time.Microsecond)
	}
	l.observe(-time.Second) // a clock that was set back
	l.observe(1000 * time.Hour)
	p := l.percentiles()
	for _, c := range []struct{ got, want time.Duration }{
		{p.p50, 5 * time.Millisecond}, {p.p99, 9900 * time.Microsecond}, {p.max, 1000 * time.Hour},
	} {
		if off := float64(c.got-c.want) / float64(c.want); off < -0.015 || off > 0.015 {
			t.Errorf("%s, want %s", c.got, c.want)
		}
	}
}

func TestMilliseconds(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0.00ms": 0, "0.41ms": 412 * time.Microsecond, "1234.50ms": 1234500 * time.Microsecond,
	} {
		if got := milliseconds(d); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
