package relay_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestLastSessionsAreKept ends a session and looks at what the status says of it and of the next one.
func TestLastSessionsAreKept(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		x := r.start().streaming()
		r.put(1, 5)
		r.pending(0)
		first := x.Status().Sessions
		if len(first) != 2 || first[1].Mode != "poll" || first[1].Reason != "mode_changed" || first[0].Ended != nil || first[0].Mode != "stream" || first[0].DeliveringSince == nil ||
			first[0].Stored != 5 || first[0].Error != "" || first[0].Attempts != 1 {
			t.Fatalf("the sessions that make the slot and stream it are %+v", first)
		}
		for n := range 19 {
			r.put(6+n, 6+n) // a session that makes progress is followed by another one at once
			r.pending(0)
			sessions := len(x.Status().Sessions)
			last := x.Status().Sessions[0].Started
			eventually(t, "the walsender is ended", func() bool {
				return r.query1(`SELECT coalesce((SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
					WHERE active_pid IS NOT NULL AND database = current_database()), false)`) == "true"
			})
			eventually(t, "another session delivers", func() bool {
				now := x.Status().Sessions
				return now[0].Started.After(last) && now[0].DeliveringSince != nil
			})
			if now := x.Status().Sessions; len(now) < min(sessions+1, 20) {
				t.Fatalf("of %d sessions and another one %d are kept", sessions, len(now))
			}
		}
		all := x.Status().Sessions
		if len(all) != 20 {
			t.Errorf("%d sessions are kept, want 20", len(all))
		}
		if old := all[1]; old.Ended == nil || old.Reason != "postgres_57P01" || old.Error == "" || old.Stored != 1 {
			t.Errorf("a session whose walsender was ended is %+v", old)
		}
		if made := first[1].Error; made != "the mode changes: the slot has been created" {
			t.Errorf("the session that made the slot ended because %q", made)
		}
		r.withoutRelay("the slot is dropped", `SELECT pg_drop_replication_slot($1)`, r.cfg.Slot)
		again := ""
		eventually(t, "the slot has been created again", func() bool {
			for _, s := range x.Status().Sessions[:4] {
				if s.Reason == "mode_changed" {
					again = s.Error
				}
			}
			return again != ""
		})
		if !strings.HasSuffix(again, "slot does not exist: it has been created again") {
			t.Errorf("the session that made the slot again ended because %q", again)
		}
		x.halt()
		if last := x.Status().Sessions[0]; last.Reason != "stopped" || last.Ended == nil {
			t.Errorf("the last session of a relay that was stopped is %+v", last)
		}
	})
}

// TestSessionsThatFailAlikeAreOne: a stream that is missing at a start ends no session, a note that the database refuses does.
func TestSessionsThatFailAlikeAreOne(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		x := r.start().streaming()
		r.exec(refuseNotesSQL)
		r.exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database()`)
		eventually(t, "attempts are counted", func() bool {
			for _, s := range x.Status().Sessions {
				if s.Attempts > 2 && s.Error != "" && s.DeliveringSince == nil {
					return true
				}
			}
			return false
		})
		if n := len(x.Status().Sessions); n > 6 {
			t.Errorf("%d sessions are kept: %+v", n, x.Status().Sessions)
		}
		r.exec(`DROP TRIGGER refuse ON outbox_sent`)
		x.streaming()
	})
}

// TestNoStreamCoversTheSubject: NATS is not away, and the session that ends says so.
func TestNoStreamCoversTheSubject(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	c := s.CachedInfo().Config
	elsewhere := c
	elsewhere.Subjects = []string{"elsewhere.>"}
	_, err = r.js().UpdateStream(t.Context(), elsewhere)
	r.must(err)
	r.put(1, 3)
	eventually(t, "a session has ended", func() bool {
		return slices.ContainsFunc(x.Status().Sessions, func(s relay.SessionStatus) bool {
			return s.Reason == "no_responders" && s.Hint != ""
		})
	})
	if n := x.metric("walpost_sessions_total", "reason", "no_responders"); n < 1 {
		t.Errorf("walpost_sessions_total counts %v such sessions", n)
	}
	_, err = r.js().UpdateStream(t.Context(), c)
	r.must(err)
	r.pending(0)
	r.storedIs(1, 3)
	for _, s := range x.Status().Sessions {
		if s.Reason == "nats_away" {
			t.Errorf("a session ended because NATS was away: %+v", s)
		}
	}
}
