package main

import (
	"golang.org/x/sys/windows"
)

// terminalWidth is the number of columns of a console. ok is false for anything else.
func terminalWidth(stream any) (columns int, ok bool) {
	f, ok := fileOf(stream)
	if !ok {
		return 0, false
	}
	var info windows.ConsoleScreenBufferInfo
	if windows.GetConsoleScreenBufferInfo(windows.Handle(f.Fd()), &info) != nil {
		return 0, false
	}
	return int(info.Window.Right-info.Window.Left) + 1, true
}

// isUnread: Windows tells it at a write only.
func isUnread(any) bool { return false }
