package retention

// SetLeastRange sets how many ids a partition has at least.
func SetLeastRange(ids int64) { leastRange = ids }

// SetRangeTries sets how often a lock is tried for that producers wait for, until reset is called.
func SetRangeTries(n int) (reset func()) {
	before := rangeTries
	rangeTries = n
	return func() { rangeTries = before }
}
