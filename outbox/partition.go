package outbox

import (
	"hash/fnv"
	"strconv"
)

// PartitionHash is what assigns an event to a partition: partition p of n has the events with hash mod n = p,
// so all events of an aggregate are in the same one. It is the 32-bit FNV-1a hash of [PartitionKey], and for
// an event without an aggregate id that of its id.
//
// It never changes: consumers keep positions by partition.
func PartitionHash(tenantID, aggregateType, aggregateID, eventID string) uint32 {
	key := PartitionKey(tenantID, aggregateType, aggregateID)
	if key == "" {
		key = eventID
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // it never fails
	return h.Sum32()
}

// PartitionKey is the name of an aggregate: "<length in bytes>:<value>/" for each of tenant id, aggregate
// type and aggregate id, and "/" for an empty one, because a message does not tell NULL from an empty text.
// It is empty without an aggregate id.
func PartitionKey(tenantID, aggregateType, aggregateID string) string {
	if aggregateID == "" {
		return ""
	}
	var key []byte
	for _, value := range [...]string{tenantID, aggregateType, aggregateID} {
		if value != "" {
			key = strconv.AppendInt(key, int64(len(value)), 10)
			key = append(append(key, ':'), value...)
		}
		key = append(key, '/')
	}
	return string(key)
}
