package main

import (
	"bytes"
	"io"
	"os"
	"sync"
	"unicode/utf8"
)

// screen escapes all that a command writes, except for line breaks and tabs: rows, messages and the errors of
// servers are written by others, and a terminal would act on the control sequences in them.
type screen struct {
	w    io.Writer
	mu   sync.Mutex
	part []byte // the beginning of a character whose other bytes have not been written yet
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := append(s.part, p...)
	n := whole(text)
	s.part = bytes.Clone(text[n:])
	if _, err := io.WriteString(s.w, escapeLines(string(text[:n]))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// flush writes the bytes of a character that has remained incomplete.
func (s *screen) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = io.WriteString(s.w, escape(string(s.part)))
	s.part = nil
}

// whole is the length of the text without a character at its end that is not all there.
func whole(text []byte) int {
	for n := len(text) - 1; n >= max(0, len(text)-utf8.UTFMax); n-- {
		if utf8.RuneStart(text[n]) {
			if utf8.FullRune(text[n:]) {
				break
			}
			return n
		}
	}
	return len(text)
}

// escapeLines is [escape] of a text of several lines.
func escapeLines(text string) string {
	return escapeAll(text, func(r rune) bool { return r != '\n' && r != '\t' && hidden(r) })
}

// trusted is the writer behind a screen: for colours, and what else walpost itself tells a terminal.
func trusted(w io.Writer) io.Writer {
	if s, ok := w.(*screen); ok {
		return s.w
	}
	return w
}

// fileOf is the file that a command writes to, where it is one.
func fileOf(stream any) (*os.File, bool) {
	if s, ok := stream.(*screen); ok {
		stream = s.w
	}
	f, ok := stream.(*os.File)
	return f, ok
}
