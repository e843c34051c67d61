package main

import "os/exec"

// packageUser is the user of the packages' unit.
const packageUser = "walpost"

// asUser is a command line that runs a command as another user: by sudo where runuser does not exist, as on
// macOS.
func asUser(user, command string) string {
	if _, err := exec.LookPath("runuser"); err != nil {
		return "sudo -u " + user + " " + command
	}
	return "runuser -u " + user + " -- " + command
}
