package outbox_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/walpost/walpost/outbox"
)

func TestLSN(t *testing.T) {
	for want, l := range map[string]outbox.LSN{
		"0/0": 0, "0/1": 1, "0/A0F0": 0xA0F0, "0/FFFFFFFF": math.MaxUint32, "1/0": 1 << 32,
		"16/B374D848": 0x16_B374D848, "FFFFFFFF/FFFFFFFF": math.MaxUint64,
	} {
		if got := l.String(); got != want {
			t.Errorf("LSN %d is %s, want %s", uint64(l), got, want)
		}
		if got, err := outbox.ParseLSN(want); err != nil || got != l {
			t.Errorf("parse %s: %v, %v", want, got, err)
		}
	}
	if got, err := outbox.ParseLSN("16/b374d848"); err != nil || got != 0x16_B374D848 {
		t.Errorf("lower case: %v, %v", got, err)
	}
}

func TestParseLSNErrors(t *testing.T) {
	for _, s := range []string{"", "0", "/", "0/", "/0", "0/0/0", "1/100000000", "-1/0", "0x1/0", "G/0", " 0/0", "1_0/0"} {
		if l, err := outbox.ParseLSN(s); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", s)) {
			t.Errorf("parse %q: %v, %v", s, l, err)
		}
	}
}

func FuzzParseLSN(f *testing.F) {
	f.Add("16/B374D848")
	f.Add("0/0")
	f.Fuzz(func(t *testing.T, s string) {
		l, err := outbox.ParseLSN(s)
		if err != nil {
			return
		}
		if again, err := outbox.ParseLSN(l.String()); err != nil || again != l {
			t.Errorf("%q is %s, and that is %s, %v", s, l, again, err)
		}
		if want := fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)); l.String() != want {
			t.Errorf("%s, want %s", l, want)
		}
	})
}
