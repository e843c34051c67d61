//go:build !race

package badinput

var buildFlags []string
