package jetstream

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// TestMatchingAgreesWithTheServer compares with nats-server's own idea of
// wildcards over random patterns of few tokens, where everything collides often.
func TestMatchingAgreesWithTheServer(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pattern := func(words ...string) string {
		tokens := make([]string, 1+r.IntN(4))
		for i := range tokens {
			tokens[i] = words[r.IntN(len(words))]
		}
		if r.IntN(4) == 0 && len(words) > 2 {
			tokens[len(tokens)-1] = ">"
		}
		return strings.Join(tokens, ".")
	}
	literals := func(p string) []string { // every subject of 1 to 5 tokens, in the end
		out := []string{p}
		for range 5 {
			out = append(out, pattern("a", "b"))
		}
		return out
	}
	for range 50_000 {
		a, b, s := pattern("a", "b", "*"), pattern("a", "b", "*"), pattern("a", "b")
		if got, want := Overlap(a, b), server.SubjectsCollide(a, b); got != want {
			t.Fatalf("Overlap(%q, %q) = %v, the server says %v", a, b, got, want)
		}
		if got, want := Covers([]string{a}, s), server.SubjectsCollide(a, s); got != want {
			t.Fatalf("Covers(%q, %q) = %v, the server says %v", a, s, got, want)
		}
		if matches(a, b) {
			for _, s := range literals(s) {
				if Covers([]string{b}, s) && !Covers([]string{a}, s) {
					t.Fatalf("matches(%q, %q), but %q is matched by the second only", a, b, s)
				}
			}
		}
	}
	for _, tt := range []struct {
		pattern, sub string
		want         bool
	}{{"a.>", "a.*", true}, {"a.*", "a.>", false}, {">", ">", true}, {"*.>", ">", false}, {"a.>", "a", false}, {"a.*", "a.*", true}} {
		if matches(tt.pattern, tt.sub) != tt.want {
			t.Errorf("matches(%q, %q) = %v", tt.pattern, tt.sub, !tt.want)
		}
	}
}
