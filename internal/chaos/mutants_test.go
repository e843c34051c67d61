package main

import "testing"

// TestMutantsCanBePlanted: the texts that they replace are still there.
func TestMutantsCanBePlanted(t *testing.T) {
	for i := range mutants {
		m := &mutants[i]
		if err := m.plant(t.Context(), map[string]string{}); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
