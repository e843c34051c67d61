//go:build !linux

package testenv

func memoryRoot() string { return "" }
