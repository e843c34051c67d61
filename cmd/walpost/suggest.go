package main

import "github.com/walpost/walpost/internal/hint"

// didYouMean is [hint.DidYouMean].
func didYouMean(typed string, candidates []string) string { return hint.DidYouMean(typed, candidates) }
