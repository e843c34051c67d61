package verify

import (
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
)

func TestWhereTheFrontIsMissing(t *testing.T) {
	first, since := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		info    jetstream.StreamInfo
		since   time.Time
		trimmed bool
	}{
		"whole":                 {jetstream.StreamInfo{FirstSeq: 1, LastSeq: 9, Messages: 9}, since, false},
		"front dropped":         {jetstream.StreamInfo{FirstSeq: 4, LastSeq: 9, Messages: 6}, since, true},
		"before what was asked": {jetstream.StreamInfo{FirstSeq: 4, LastSeq: 9, Messages: 6}, first.Add(time.Hour), false},
		"begins later":          {jetstream.StreamInfo{FirstSeq: 4, LastSeq: 9, Messages: 6, Config: natsjs.StreamConfig{FirstSeq: 4}}, since, false},
		"empty":                 {jetstream.StreamInfo{FirstSeq: 10, LastSeq: 9}, since, false},
		"new":                   {jetstream.StreamInfo{}, since, false},
	} {
		v := &comparison{since: c.since}
		c.info.FirstTime = first
		v.trim(&c.info)
		want := c.since
		if c.trimmed {
			want = first.Add(time.Minute)
		}
		if v.trimmed != c.trimmed || !v.since.Equal(want) {
			t.Errorf("%s: trimmed %t, compared since %s, want %s", name, v.trimmed, v.since, want)
		}
	}
}

// TestAnEmptyStreamIsNotAskedAgain: what the relay stores while rows are repaired
// would look like the rest of a stream that has dropped its front.
func TestAnEmptyStreamIsNotAskedAgain(t *testing.T) {
	v := &comparison{wasEmpty: true} // without a stream to ask
	if rows, err := v.kept(t.Context(), make([]table.MarkedRow, 3)); err != nil || len(rows) != 3 {
		t.Errorf("%d rows are left of 3: %v", len(rows), err)
	}
}
