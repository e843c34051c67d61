package relay

// SetMostHeld changes how many held aggregates are remembered, and returns what changes it
// back. No relay may run meanwhile.
func SetMostHeld(n int) (reset func()) {
	before := mostHeld
	mostHeld = n
	return func() { mostHeld = before }
}

// SetMostCompared changes how many rows a recovery scan keeps to compare.
func SetMostCompared(n int) (reset func()) {
	before := mostCompared
	mostCompared = n
	return func() { mostCompared = before }
}

// SetMovedRows changes how many rows of partitioned tables are remembered.
func SetMovedRows(n int) (reset func()) {
	before := movedRows
	movedRows = n
	return func() { movedRows = before }
}

// Moved is how many rows of partitioned tables the current session remembers.
func (r *Relay) Moved() int {
	m := r.current.Load().poller.moved
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.taken) + len(m.polled)
}

// DoctorsOwnChecks are the names of the checks that a start does not make.
func (r *Relay) DoctorsOwnChecks() (names []string) {
	for _, c := range (&checker{starter: r.newStarter(nil)}).checks() {
		if c.Doctor {
			names = append(names, c.Name)
		}
	}
	return names
}
