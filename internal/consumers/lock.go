// Package consumers has what package consume and `walpost consumers` know of consumers in common: their
// locks, and the tables in which an operator looks and changes something.
package consumers

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Members is the number of the lock that all processes of a consumer share. The locks of partitions have the
// partitions' numbers.
const Members = -1

// LockKey is the key of an advisory lock of a consumer whose tables are in the schema.
func LockKey(schema, consumer string, number int) int64 {
	h := sha256.New()
	fmt.Fprintf(h, "walpost consume\x00%s\x00%s\x00%d", schema, consumer, number)
	return int64(binary.BigEndian.Uint64(h.Sum(nil)))
}
