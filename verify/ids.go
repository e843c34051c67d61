package verify

import (
	"strconv"

	"github.com/RoaringBitmap/roaring/v2/roaring64"

	"github.com/walpost/walpost/outbox"
)

// dense is where numbers are too far apart to share a bitmap's containers: those of
// a sequence stay below it, those made of a clock or at random do not.
const dense = 1 << 40

// ids is a set of rows' ids: numbers of a sequence in a compressed bitmap, which
// takes a bit to two bytes for each, and others by their 64 bits, or by a hash of
// 64 bits, in some 20 bytes.
type ids struct {
	numbers *roaring64.Bitmap
	others  map[uint64]struct{}
}

func newIDs() *ids { return &ids{roaring64.New(), map[uint64]struct{}{}} }

// add reports whether the id was not there.
func (s *ids) add(id string) bool {
	n, isDense := number(id)
	if isDense {
		return s.numbers.CheckedAdd(n)
	}
	before := len(s.others)
	s.others[n] = struct{}{}
	return len(s.others) > before
}

func (s *ids) has(id string) bool {
	n, isDense := number(id)
	if isDense {
		return s.numbers.Contains(n)
	}
	_, ok := s.others[n]
	return ok
}

func number(id string) (n uint64, isDense bool) {
	if i, err := strconv.ParseInt(id, 10, 64); err == nil {
		return uint64(i), i >= 0 && i < dense
	}
	return outbox.HashText([]byte(id), 0), false
}
