//go:build unix

package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// terminalWidth is the number of columns, 0 where the terminal does not say. ok is false for every other
// device, such as /dev/null.
func terminalWidth(stream any) (columns int, ok bool) {
	if s, ok := stream.(*screen); ok {
		stream = s.w
	}
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
