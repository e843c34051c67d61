package main

import (
	"os"

	"golang.org/x/sys/windows"
)

// terminalWidth is the number of columns of a console. ok is false for anything else.
func terminalWidth(stream any) (columns int, ok bool) {
	if s, ok := stream.(*screen); ok {
		stream = s.w
	}
	f, ok := stream.(*os.File)
	if !ok {
		return 0, false
	}
	var info windows.ConsoleScreenBufferInfo
	if windows.GetConsoleScreenBufferInfo(windows.Handle(f.Fd()), &info) != nil {
		return 0, false
	}
	return int(info.Window.Right-info.Window.Left) + 1, true
}
