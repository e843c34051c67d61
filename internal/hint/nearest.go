package hint

import (
	"fmt"
	"strings"
)

// DidYouMean is a hint with the candidate that is closest to the typed text, or "" where none is close.
func DidYouMean(typed string, candidates []string) string {
	best, distance := "", 1+max(1, len(typed)/3)
	for _, c := range candidates {
		if d := editDistance(strings.ToLower(typed), strings.ToLower(c)); c != "" && d < distance {
			best, distance = c, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("did you mean %s?", best)
}

// editDistance counts the inserted, deleted, replaced and swapped bytes between a and b.
func editDistance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
