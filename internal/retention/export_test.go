package retention

// SetLeastRange sets how many ids a partition has at least.
func SetLeastRange(ids int64) { leastRange = ids }
