package publish

import (
	"strings"
	"sync"
	"time"

	"github.com/walpost/walpost/outbox"
)

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

// overlap reports whether some subject is matched by both patterns.
func overlap(a, b string) bool {
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

const (
	// maxCachedSubjects bounds the memory of a template with an aggregate's id in it.
	maxCachedSubjects = 4096
	// denial is how long a subject that a permission error named is not tried
	// again: long enough for the next session to meet the row and park it, short
	// enough for a corrected permission to be noticed.
	denial = time.Minute
)

// Subjects renders events' subjects and decides whether they may be sent.
type Subjects struct {
	template *Template

	// mu guards what follows: the lane renders, the connection's own goroutine
	// denies.
	mu       sync.Mutex
	patterns []string
	cache    map[string]subject
	denied   map[string]time.Time // until when
	scratch  []byte
}

type subject struct {
	text    string
	covered bool
}

// NewSubjects returns Subjects that refuse every row until [Subjects.Cover].
func NewSubjects(t *Template) *Subjects {
	return &Subjects{template: t, cache: map[string]subject{}, denied: map[string]time.Time{}}
}

// Cover sets the subjects that the stream listens on.
func (s *Subjects) Cover(patterns []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.patterns = patterns
	clear(s.cache)
}

// Of is the event's subject. Its error is a [*RowError].
func (s *Subjects) Of(ev *outbox.Event) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	buf, err := s.template.Render(s.scratch[:0], ev)
	if err != nil {
		return "", err
	}
	s.scratch = buf
	found, ok := s.cache[string(buf)]
	if !ok {
		found = s.add(string(buf))
	}
	if !found.covered {
		return "", rowErrorf(RowUncovered, "the stream does not listen on subject %s", excerpt(buf))
	}
	if len(s.denied) > 0 && s.isDenied(found.text) {
		return "", rowErrorf(RowPermission, "no permission to publish on subject %s", excerpt(buf))
	}
	return found.text, nil
}

func (s *Subjects) add(text string) subject {
	if len(s.cache) >= maxCachedSubjects {
		clear(s.cache)
	}
	found := subject{text: text, covered: Covers(s.patterns, text)}
	s.cache[text] = found
	return found
}

// Deny makes rows of a subject that a permission error named their own fault,
// for a minute.
func (s *Subjects) Deny(subject string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.denied) >= maxCachedSubjects {
		clear(s.denied)
	}
	s.denied[subject] = time.Now().Add(denial)
}

func (s *Subjects) isDenied(subject string) bool {
	until, ok := s.denied[subject]
	if ok && time.Now().After(until) {
		delete(s.denied, subject)
		return false
	}
	return ok
}
