// Package walpost has the project's documents, which `walpost docs` shows. The packages for applications
// are outbox, consume, idempotency and catalog.
package walpost

import "embed"

// Documents are the Markdown files and the pictures that they show, by their paths in the repository.
//
//go:embed *.md docs/*.md docs/benchmarks/*.svg docs/diagrams/*.svg docs/screenshots/*.png
//go:embed deploy/README.md examples/*/README.md
var Documents embed.FS
