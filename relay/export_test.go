package relay

import "time"

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

// SetMostMoved changes how many rows of partitioned tables are remembered.
func SetMostMoved(n int) (reset func()) {
	before := mostMoved
	mostMoved = n
	return func() { mostMoved = before }
}

// Moved is how many rows of partitioned tables the current session remembers.
func (r *Relay) Moved() int {
	return r.current.Load().moved.Len()
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

// SetOncePatience changes how long a relay that runs once tries again.
func SetOncePatience(d time.Duration) (reset func()) {
	before := oncePatience
	oncePatience = d
	return func() { oncePatience = before }
}
