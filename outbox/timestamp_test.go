package outbox_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/outbox"
)

func TestParseTimestamp(t *testing.T) {
	for s, want := range map[string]string{
		"2026-11-20 10:17:35.043443+00":   "2026-11-20T10:17:35.043443Z",
		"2026-11-20 10:17:35+00":          "2026-11-20T10:17:35Z",
		"2026-11-20 10:17:35.57065+00":    "2026-11-20T10:17:35.57065Z",
		"2026-11-20 10:17:35.5":           "2026-11-20T10:17:35.5Z",
		"2026-11-20 10:17:35":             "2026-11-20T10:17:35Z",
		"2026-11-20 16:02:35.5+05:45":     "2026-11-20T10:17:35.5Z",
		"2026-11-20 05:17:35-05":          "2026-11-20T10:17:35Z",
		"1850-01-01 00:00:00+00:53:28":    "1849-12-31T23:06:32Z",
		"1850-01-01 00:00:00-00:53:28":    "1850-01-01T00:53:28Z",
		"0001-01-01 00:00:00+00":          "0001-01-01T00:00:00Z",
		"9999-12-31 23:59:59.999999+00":   "9999-12-31T23:59:59.999999Z",
		"294276-12-31 23:59:59.999999+00": "294276-12-31T23:59:59.999999Z",
		"2024-02-29 00:00:00+00":          "2024-02-29T00:00:00Z",
		"0044-03-15 12:00:00+00 BC":       "0001-01-01T00:00:00Z",
		"0005-02-29 12:00:00.5 BC":        "0001-01-01T00:00:00Z",
	} {
		got, err := outbox.ParseTimestamp([]byte(s))
		if err != nil || got.Format(time.RFC3339Nano) != want {
			t.Errorf("parse %q: %s, %v, want %s", s, got.Format(time.RFC3339Nano), err, want)
		}
	}
}

func TestParseTimestampInfinity(t *testing.T) {
	far, err := outbox.ParseTimestamp([]byte("infinity"))
	check(t, err)
	last, err := outbox.ParseTimestamp([]byte("294276-12-31 23:59:59.999999+00"))
	check(t, err)
	if !far.After(last) || time.Until(far) < 24*time.Hour {
		t.Errorf("infinity is %s", far)
	}
	past, err := outbox.ParseTimestamp([]byte("-infinity"))
	if err != nil || !past.IsZero() {
		t.Errorf("-infinity is %s, %v", past, err)
	}
}

func TestParseTimestampErrors(t *testing.T) {
	for _, s := range []string{
		"", "2026", "2026-11-20", "2026-11-20T10:17:35Z", "20.11.2026 16:02:35.043443 +0545", "2026-11-20 10:17", "2026-11-20 10:17:35.",
		"2026-11-20 10:17:35+", "2026-11-20 10:17:35+0", "2026-11-20 10:17:35+00 ", "2026-11-20 10:17:35.0434430+00", "26-11-20 10:17:35",
		"2026-13-20 10:17:35", "2026-00-20 10:17:35", "2026-11-31 10:17:35", "2026-11-00 10:17:35", "2026-11-20 24:00:01",
		"2026-11-20 10:60:35", "2026-11-20 10:17:61", "2023-02-29 00:00:00", "Infinity", "2026-11-20 10:17:35 XX", "2026-11-20 10:17:35+00:60", "0000-01-01 00:00:00",
		"2026-11-20 10:17:35+16", "2026-11-20 10:17:35+00:00:60", "2026-11-20 10:17:35BC", "2026-11-20 10:17:35+00 BC ", "0044-02-30 00:00:00+00 BC", "2026-11-20 10:17:35+00:",
	} {
		if got, err := outbox.ParseTimestamp([]byte(s)); err == nil || !strings.Contains(err.Error(), s) {
			t.Errorf("parse %q: %s, %v", s, got, err)
		}
	}
}

// FuzzParseTimestamp compares with package time, which reads the same form for
// years of four digits.
func FuzzParseTimestamp(f *testing.F) {
	for _, s := range []string{
		"2026-11-20 10:17:35.043443+00", "2026-11-20 16:02:35.5+05:45", "2026-11-20 10:17:35", "infinity",
		"0044-03-15 12:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "2023-02-29 00:00:00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := outbox.ParseTimestamp([]byte(s))
		for _, layout := range []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05-07", "2006-01-02 15:04:05-07:00", "2006-01-02 15:04:05-07:00:00"} {
			want, errTime := time.Parse(layout, s)
			if errTime != nil {
				continue
			}
			if err != nil && beyondServer(s, want) {
				return
			}
			if err != nil || !got.Equal(want) {
				t.Errorf("%q is %s, %v, want %s", s, got, err, want)
			}
			return
		}
		if err == nil && len(s) < len("10000-01-01 00:00:00") && !strings.HasSuffix(s, "infinity") {
			t.Errorf("%q is %s, but package time refuses it", s, got)
		}
	})
}

// serverForm is what a server writes of a year of four digits. Package time also
// takes blanks before a number, an hour of one digit, and a comma.
var serverForm = regexp.MustCompile(`^[0-9]{4}(-[0-9]{2}){2} ([0-9]{2}:){2}[0-9]{2}([.][0-9]{1,6})?([+-][0-9]{2}(:[0-5][0-9]){0,2})?$`)

// beyondServer reports what package time takes and no server writes.
func beyondServer(s string, t time.Time) bool {
	_, offset := t.Zone()
	return !serverForm.MatchString(s) || strings.HasPrefix(s, "0000") || offset <= -16*3600 || offset >= 16*3600
}
