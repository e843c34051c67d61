package main

import (
	"bytes"
	"testing"
)

// TestScreen: characters that arrive in parts, and what no terminal may get.
func TestScreen(t *testing.T) {
	for _, c := range []struct {
		writes []string
		want   string
	}{
		{[]string{"plain é 漢\n\tnext\n"}, "plain é 漢\n\tnext\n"},
		{[]string{"\x1b[2J\a\r\n\x00\x7f"}, `\u001b[2J\u0007\u000d` + "\n" + `\u0000\u007f`},
		{[]string{"\u009b\u202e\u2066\u200f\u061c"}, `\u009b\u202e\u2066\u200f\u061c`},
		{[]string{"\xc3", "\xa9\xe6", "\xbc", "\xa2\n"}, "é漢\n"},
		{[]string{"\xc2", "\x9b"}, `\u009b`},
		{[]string{"\xe6\xbc", "x\x9b2J"}, `\ufffd\ufffdx\ufffd2J`},
		{[]string{"\xe6", "", "\xbc"}, `\ufffd\ufffd`},
		{[]string{"\xe6\xbc\n"}, `\ufffd\ufffd` + "\n"},
	} {
		var out bytes.Buffer
		s := &screen{w: &out}
		for _, p := range c.writes {
			if n, err := s.Write([]byte(p)); n != len(p) || err != nil {
				t.Errorf("%q: wrote %d: %v", p, n, err)
			}
		}
		if s.flush(); out.String() != c.want {
			t.Errorf("%q became %q, want %q", c.writes, &out, c.want)
		}
	}
}
