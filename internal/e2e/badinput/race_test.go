//go:build race

package badinput

// buildFlags make the relay as watchful as its test.
var buildFlags = []string{"-race"}
