//go:build !crashpoints

// Package crash names the places where a test kills the process.
package crash

// At does nothing. Built with the tag crashpoints, it ends the process as SIGKILL does, at the place and
// time that WALPOST_CRASH names.
func At(string) {}
