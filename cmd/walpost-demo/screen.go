package main

import (
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// screen prints lines and, on a terminal, keeps a block of lines below them that
// is redrawn in place.
type screen struct {
	live  bool // out is a terminal that moves its cursor
	color bool
	fd    int // of the terminal

	mu       sync.Mutex // guards what follows
	out, err io.Writer
	drawn    []string // the block
}

func newScreen(out, err io.Writer) *screen {
	s := &screen{out: out, err: err}
	if f, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		s.fd = int(f.Fd())
		_, e := unix.IoctlGetWinsize(s.fd, unix.TIOCGWINSZ)
		s.live = e == nil
	}
	s.color = s.live && os.Getenv("NO_COLOR") == ""
	return s
}

// interval is how often there is something new to see.
func (s *screen) interval() time.Duration {
	if s.live {
		return 100 * time.Millisecond
	}
	return time.Second
}

// width of the terminal; 80 without a terminal.
func (s *screen) width() int {
	if s.live {
		if w, err := unix.IoctlGetWinsize(s.fd, unix.TIOCGWINSZ); err == nil && w.Col > 0 {
			return int(w.Col)
		}
	}
	return 80
}

// println prints lines above the block.
func (s *screen) println(lines ...string) {
	s.above(s.out, strings.Join(lines, "\n")+"\n")
}

// above is for text that ends with a line break.
func (s *screen) above(w io.Writer, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	drawn := s.drawn
	s.redraw(nil)
	_, _ = io.WriteString(w, text)
	s.redraw(drawn)
}

// block replaces the block. It prints nothing where text cannot be replaced.
func (s *screen) block(lines []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live {
		s.redraw(lines)
	}
}

// clear removes the block.
func (s *screen) clear() { s.block(nil) }

// redraw writes the block in one piece over the one that is there.
func (s *screen) redraw(lines []string) {
	var b strings.Builder
	for range s.drawn {
		b.WriteString("\x1b[A")
	}
	width := s.width() - 1
	for _, l := range lines {
		b.WriteString("\r" + clip(l, width) + "\x1b[K\n")
	}
	if len(s.drawn) > 0 {
		b.WriteString("\r\x1b[J")
	}
	s.drawn = lines
	_, _ = io.WriteString(s.out, b.String())
}

// clip cuts a line that would wrap. Escape sequences have no width.
func clip(line string, width int) string {
	n, escape := 0, false
	for i, r := range line {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		case n == width:
			return line[:i] + "\x1b[m"
		default:
			n++
		}
	}
	return line
}

// stderr is for logs: they do not tear the block apart.
func (s *screen) stderr() io.Writer { return aboveWriter{s} }

type aboveWriter struct{ s *screen }

func (w aboveWriter) Write(p []byte) (int, error) {
	w.s.above(w.s.err, string(p))
	return len(p), nil
}

func (s *screen) style(code, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[m"
}

func (s *screen) bold(t string) string  { return s.style("1", t) }
func (s *screen) dim(t string) string   { return s.style("2", t) }
func (s *screen) red(t string) string   { return s.style("1;31", t) }
func (s *screen) green(t string) string { return s.style("32", t) }

// pad fills up to a width, left or right of the text.
func pad(t string, width int) string {
	fill := strings.Repeat(" ", max(0, abs(width)-utf8.RuneCountInString(t)))
	if width < 0 {
		return fill + t
	}
	return t + fill
}

func abs(n int) int { return max(n, -n) }
