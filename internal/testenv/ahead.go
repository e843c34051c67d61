package testenv

// AheadSQL tells whether the canonical table has $1 rows that are due, none of which has failed. A load that
// waits then has no more rows on a slow machine, on which relays and a test's steps take long, than on a fast
// one.
const AheadSQL = `SELECT count(*) = $1 FROM (SELECT FROM outbox_messages
	WHERE processed_at IS NULL AND last_error IS NULL AND (available_at > now()) IS NOT TRUE LIMIT $1) x`
