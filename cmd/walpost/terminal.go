package main

import (
	"fmt"
	"os"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// terminalWidth is the number of columns, 0 where the terminal does not say; ok is false where it is no terminal. Any other
// device, such as /dev/null, is none.
func terminalWidth(stream any) (columns int, ok bool) {
	f, ok := stream.(*os.File)
	if !ok {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return int(size.Col), true
}

// escape writes what is not to be printed (control characters, escape sequences, reversed text, broken UTF-8) as JSON does:
// a terminal does not act on it, and JSON stays what it is.
func escape(s string) string {
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
