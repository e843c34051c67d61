package house

import "strings"

// MaxColumns is where a line of Go ends.
const MaxColumns = 110

// tabColumns is what a tab counts for, wherever it stands in the line.
const tabColumns = 4

// Columns is the width of a line: its characters, and [tabColumns] for a tab.
func Columns(line string) int {
	return len([]rune(line)) + (tabColumns-1)*strings.Count(line, "\t")
}

// LongLines are the numbers of the lines, comments included, that are wider than [MaxColumns].
func LongLines(text string) (long []int) {
	number := 0
	for line := range strings.Lines(text) {
		number++
		if Columns(strings.TrimRight(line, "\n")) > MaxColumns {
			long = append(long, number)
		}
	}
	return long
}
