package main

import "slices"

// graph is the files of a package and the arrows between them.
type graph struct {
	names []string
	to    map[string]map[string]bool
}

func newGraph() *graph { return &graph{to: map[string]map[string]bool{}} }

func (g *graph) node(name string) {
	if g.to[name] == nil {
		g.to[name] = map[string]bool{}
		g.names = append(g.names, name)
	}
}

func (g *graph) arrow(from, to string) {
	if from != to {
		g.node(from)
		g.node(to)
		g.to[from][to] = true
	}
}

func (g *graph) size() (n int) {
	for _, to := range g.to {
		n += len(to)
	}
	return n
}

// backUp is how many arrows lead upwards in the best order that is found.
func (g *graph) backUp() int {
	order := g.start()
	for {
		better := g.improve(order)
		if better == nil {
			return g.up(order)
		}
		order = better
	}
}

// start puts files that use many and are used by few to the top.
func (g *graph) start() []string {
	weight := map[string]int{}
	for from, to := range g.to {
		weight[from] += len(to)
		for name := range to {
			weight[name]--
		}
	}
	order := slices.Sorted(slices.Values(g.names))
	slices.SortStableFunc(order, func(a, b string) int { return weight[b] - weight[a] })
	return order
}

// improve moves one file to where fewer arrows lead upwards; nil where no move helps.
func (g *graph) improve(order []string) []string {
	least := g.up(order)
	for i := range order {
		for j := range order {
			moved := slices.Delete(slices.Clone(order), i, i+1)
			moved = slices.Insert(moved, j, order[i])
			if g.up(moved) < least {
				return moved
			}
		}
	}
	return nil
}

func (g *graph) up(order []string) (n int) {
	above := map[string]bool{}
	for _, name := range order {
		for to := range g.to[name] {
			if above[to] {
				n++
			}
		}
		above[name] = true
	}
	return n
}

// inCycles is how many files can reach themselves.
func (g *graph) inCycles() (n int) {
	for _, name := range g.names {
		reached := map[string]bool{}
		g.reach(name, reached)
		if reached[name] {
			n++
		}
	}
	return n
}

func (g *graph) reach(from string, reached map[string]bool) {
	for to := range g.to[from] {
		if !reached[to] {
			reached[to] = true
			g.reach(to, reached)
		}
	}
}
