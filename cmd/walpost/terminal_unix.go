//go:build unix

package main

import (
	"golang.org/x/sys/unix"
)

// terminalWidth is the number of columns, 0 where the terminal does not say. ok is false for every other
// device, such as /dev/null.
func terminalWidth(stream any) (columns int, ok bool) {
	f, ok := fileOf(stream)
	if !ok {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return int(size.Col), true
}

// isUnread reports whether the stream is a pipe or a terminal whose other end is closed.
func isUnread(stream any) bool {
	f, ok := fileOf(stream)
	if !ok {
		return false
	}
	poll := []unix.PollFd{{Fd: int32(f.Fd())}} // POLLERR and POLLHUP are reported without being asked for
	_, err := unix.Poll(poll, 0)
	return err == nil && poll[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
}
