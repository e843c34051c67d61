//go:build race

package e2e

// buildFlags make the relay as watchful as its test.
var buildFlags = []string{"-race"}
