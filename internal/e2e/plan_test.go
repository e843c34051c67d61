package e2e

import (
	"math"
	"math/rand/v2"
	"slices"
)

// plan is what a transaction is going to do.
type plan struct {
	steps    []step
	rollback bool
}

// step is one INSERT of some rows of an aggregate, in a savepoint or not.
type step struct {
	aggregate int64
	rows      int
	pad       int
	savepoint savepoint
}

type savepoint string

const (
	kept     savepoint = "kept" // in no savepoint
	released savepoint = "released"
	undone   savepoint = "undone"
)

// rows that the plan leaves behind when it commits: 1 to 1,000.
func (p plan) rows() (n int) {
	for _, s := range p.steps {
		if s.savepoint != undone {
			n += s.rows
		}
	}
	return n
}

func (p plan) locks() (aggregates []int64) {
	for _, s := range p.steps {
		aggregates = append(aggregates, s.aggregate)
	}
	slices.Sort(aggregates)
	return slices.Compact(aggregates)
}

// planner draws plans: mostly small ones, a tenth of them rolled back.
type planner struct{ *rand.Rand }

func (r planner) next() plan {
	p := plan{rollback: r.IntN(10) == 0}
	size := r.spread(20)
	if r.IntN(8) == 0 {
		size = r.spread(1000)
	}
	for size > 0 {
		n := 1 + r.IntN(size)
		if len(p.steps) == 5 {
			n = size
		}
		size -= n
		p.steps = append(p.steps, r.step(n, kept))
	}
	if s := &p.steps[r.IntN(len(p.steps))]; r.IntN(6) == 0 {
		s.savepoint = released
	}
	if r.IntN(5) == 0 {
		p.steps = slices.Insert(p.steps, r.IntN(len(p.steps)+1), r.step(r.spread(50), undone))
	}
	return p
}

func (r planner) step(rows int, s savepoint) step {
	return step{aggregate: r.Int64N(aggregates), rows: rows, pad: r.IntN(100), savepoint: s}
}

// spread draws from 1 to most, small numbers as often as large ones.
func (r planner) spread(most float64) int {
	return int(math.Exp(r.Float64() * math.Log(most+1)))
}
