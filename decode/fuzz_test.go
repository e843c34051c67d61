package decode_test

import (
	"runtime"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// FuzzDecode feeds a session, in the form of a recording, to one decoder: it
// answers everything without a panic, reads nothing beyond a message, and
// allocates in proportion to what it is given.
func FuzzDecode(f *testing.F) {
	for _, path := range recordings(f, "pg*.gz") {
		for _, session := range transactions(readRecording(f, path)) {
			f.Add(session)
		}
	}
	tables := append(recordedTables(), events())
	f.Fuzz(func(t *testing.T, session []byte) {
		messages, _ := split(session)
		d := decode.New(tables, nil)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for _, data := range messages {
			m, err := d.Decode(data)
			if err != nil {
				if m != (decode.Message{}) {
					t.Fatalf("message %+v beside the error %v", m, err)
				}
				continue
			}
			checkMessage(t, data, m)
		}
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20+256*uint64(len(session)) {
			t.Fatalf("%d bytes allocated for a session of %d", used, len(session))
		}
	})
}

func checkMessage(t *testing.T, data []byte, m decode.Message) {
	if (m.Kind == decode.Row) != (m.Event != nil) {
		t.Fatalf("%s with event %v", m.Kind, m.Event)
	}
	if m.Kind == decode.Commit && m.End <= m.Commit {
		t.Fatalf("commit %s ends at %s", m.Commit, m.End)
	}
	if m.Event == nil {
		return
	}
	if m.Event.Table == nil || m.Event.N == 0 {
		t.Fatalf("row of table %v with ordinal %d", m.Event.Table, m.Event.N)
	}
	for f, v := range m.Event.Values {
		if v != nil && !m.Event.Table.Layout.Has(outbox.Field(f)) {
			t.Fatalf("%s is not mapped, but %q", outbox.Field(f), v)
		}
		if cap(v) != len(v) {
			t.Fatalf("%s can be appended to", outbox.Field(f))
		}
	}
	m.Event.Hash()
	if m.Event.Size() > 128+4*len(data)*int(outbox.NumFields) {
		t.Fatalf("%d bytes of values in a message of %d", m.Event.Size(), len(data))
	}
}

// transactions cuts a recording into sessions of one short transaction each,
// with the relations that it needs.
func transactions(messages [][]byte) (sessions [][]byte) {
	relations := make(map[string][]byte)
	var tx [][]byte
	for _, m := range messages {
		tx = append(tx, m)
		switch m[0] {
		case 'R':
			relations[string(m[1:5])] = m
		case 'B':
			for _, r := range relations {
				tx = append(tx, r)
			}
		case 'C':
			if session := join(tx); len(session) < 8<<10 {
				sessions = append(sessions, session)
			}
			tx = nil
		}
	}
	return sessions
}
