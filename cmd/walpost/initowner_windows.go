package main

import "github.com/walpost/walpost/internal/setup"

// checkOwners is about root, which Windows does not have.
func checkOwners([]*setup.Step) error { return nil }
