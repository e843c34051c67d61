package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// paint writes a text in a colour on a terminal, unless NO_COLOR is set (no-color.org).
func paint(w io.Writer, colour, text string) {
	if colour != "" && colours(w) {
		w, text = trusted(w), colour+text+reset
	}
	fmt.Fprint(w, text)
}

func colours(w io.Writer) bool {
	_, terminal := terminalWidth(w)
	return terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

const (
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	blue   = "\x1b[34m"
	reset  = "\x1b[0m"
)

// escape writes what is not to be printed (control characters, escape sequences, reversed text, broken UTF-8)
// as JSON does: a terminal does not act on it, and JSON stays what it is.
func escape(s string) string { return escapeAll(s, hidden) }

func escapeAll(s string, hidden func(rune) bool) string {
	if !strings.ContainsFunc(s, hidden) {
		return s
	}
	var out strings.Builder
	for _, r := range s {
		if !hidden(r) {
			out.WriteRune(r)
			continue
		}
		if r1, r2 := utf16.EncodeRune(r); r1 != utf8.RuneError {
			fmt.Fprintf(&out, `\u%04x\u%04x`, r1, r2)
			continue
		}
		fmt.Fprintf(&out, `\u%04x`, r)
	}
	return out.String()
}

func hidden(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }

// cut shortens s to n characters, the last of them an ellipsis; 0 is no limit.
func cut(s string, n int) string {
	if n == 0 || utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}
