package main

import "testing"

func TestArrowsThatLeadBackUp(t *testing.T) {
	g := newGraph()
	for _, a := range []string{"ab", "bc", "ca", "cd", "de", "xe", "ex", "yy"} {
		g.arrow(a[:1], a[1:])
	}
	g.node("z")
	// One arrow of a-b-c and one of e-x have to lead upwards, wherever the files stand.
	for _, c := range []struct {
		what      string
		got, want int
	}{{"arrows", g.size(), 7}, {"back up", g.backUp(), 2}, {"in cycles", g.inCycles(), 5}} {
		if c.got != c.want {
			t.Errorf("%s: got %d, want %d", c.what, c.got, c.want)
		}
	}
}
