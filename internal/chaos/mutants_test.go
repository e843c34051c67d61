package main

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestMutantsCanBePlanted: the texts that they replace are still there, and what comes
// out is a program.
func TestMutantsCanBePlanted(t *testing.T) {
	for i := range mutants {
		m := &mutants[i]
		if _, err := relayProgram(t.Context(), m); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
