package publish

import (
	"sync"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

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

	// mu guards what follows: the publisher renders, the connection's own goroutine
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

// Of is the event's subject. Its error is a [*outbox.RowError].
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
		return "", rowErrorf(outbox.RowUncovered, "the stream does not listen on subject %s", excerpt(buf))
	}
	if len(s.denied) > 0 && s.isDenied(found.text) {
		return "", rowErrorf(outbox.RowPermission, "no permission to publish on subject %s", excerpt(buf))
	}
	return found.text, nil
}

func (s *Subjects) add(text string) subject {
	if len(s.cache) >= maxCachedSubjects {
		clear(s.cache)
	}
	found := subject{text: text, covered: jetstream.Covers(s.patterns, text)}
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
