package relay

// SetMostHeld changes how many held aggregates are remembered, and returns what changes it
// back. No relay may run meanwhile.
func SetMostHeld(n int) (reset func()) {
	before := mostHeld
	mostHeld = n
	return func() { mostHeld = before }
}

// SetMostCompared changes how many rows a read-back keeps to compare.
func SetMostCompared(n int) (reset func()) {
	before := mostCompared
	mostCompared = n
	return func() { mostCompared = before }
}
