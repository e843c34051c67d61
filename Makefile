# Everything that needs a server starts a private one on loopback; nothing
# here touches a server that is already running.

FUZZTIME ?= 30s

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## run the relay on a private PostgreSQL and an embedded NATS (ARGS=--help)
	@.ci/deps postgres
	@[ -x bin/walpost-demo ] || echo "building walpost-demo, which takes a while the first time" >&2
	@CGO_ENABLED=0 go build -buildvcs=false -o bin/walpost-demo ./cmd/walpost-demo
	@. .ci/pgenv && exec bin/walpost-demo $(ARGS)

.PHONY: shop
shop: ## run examples/shop on private servers, and break things meanwhile (ARGS=--help)
	@.ci/deps postgres
	@[ -x bin/walpost-shop ] || echo "building walpost-shop, which takes a while the first time" >&2
	@CGO_ENABLED=0 go build -buildvcs=false -o bin/ ./cmd/walpost ./cmd/walpost-shop
	@. .ci/pgenv && exec bin/walpost-shop -walpost $(CURDIR)/bin/walpost $(ARGS)

# Go stamps the revision of a checkout, but fails in one that git does not trust. What git
# says is stamped here instead; nothing where it says nothing.
VERSION := $(shell git describe --tags --dirty 2>/dev/null)
REVISION := $(shell git describe --always --exclude '*' --abbrev=12 --dirty 2>/dev/null)
COMMIT_TIME := $(shell git log -1 --format=%cI 2>/dev/null)
LDFLAGS = $(if $(VERSION),-X main.version=$(VERSION)) $(if $(REVISION),-X main.revision=$(REVISION)) \
	$(if $(COMMIT_TIME),-X main.commitTime=$(COMMIT_TIME))

.PHONY: build
build: ## build walpost into bin/
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "$(LDFLAGS)" -o bin/ ./cmd/walpost

.PHONY: test
# Without GORACE each process that the race detector watches waits for a second when it ends; the tests
# start hundreds of them.
# The longest packages first. Tests wait a good part of their time, so six of a package run at once,
# and of packages one more than there are processors. `make lint` has vetted the tests.
test: deps pg-extra examples ## run every test, race-enabled (WALPOST_PG_ALL=1: each on all PostgreSQL versions within reach)
	@. .ci/pgenv && . .ci/memtemp && go run ./internal/testenv/pgversions && \
		GORACE=atexit_sleep_ms=50 CGO_ENABLED=1 go test -race -vet=off -count=1 -p $$(($$(getconf _NPROCESSORS_ONLN) + 1)) -parallel 6 \
		-timeout 80m ./relay ./cmd/walpost ./internal/chaos ./internal/console/browser ./bench ./...

.PHONY: test-all
test-all: export WALPOST_TEST_ALL = 1
test-all: test ## run every test in full: a million rows, rows of 900 MB, every combination, minutes of fuzzing
	@. .ci/pgenv && .ci/fuzz 2m

.PHONY: lint
lint: ## vet, staticcheck, the formatting, the workflows, and other platforms
	@go run ./internal/house/typecheck ./cmd/walpost darwin/arm64 windows/amd64
	go vet ./...
	go tool staticcheck ./...
	go -C .ci/tools tool actionlint $(CURDIR)/.github/workflows/*.yaml
	@out=$$(find . -name '*.go' -not -path './.*' -exec go tool gofumpt -l {} +) && \
		if [ -n "$$out" ]; then echo "not formatted by gofumpt:"; echo "$$out"; exit 1; fi

.PHONY: release
release: ## build archives, packages, image, chart and checksums into dist/ (ARGS="-platforms linux/amd64")
	@go run ./internal/release $(ARGS)

.PHONY: release-check
release-check: ## build the commit in two directories, compiling everything twice, and compare all bytes
	@go run ./internal/release -check -cold $(ARGS)

.PHONY: vuln
vuln: ## look for insecure code, and for known vulnerabilities where their database can be reached
	@.ci/vuln

.PHONY: fuzz
fuzz: ## run every fuzz target, each for FUZZTIME (30s)
	@. .ci/pgenv && .ci/fuzz $(FUZZTIME)

# The seeds of `make chaos`: between them they have every kind of server, and those
# that have found something.
SEEDS ?= 2,7,23,46,803358146804981,3288942553247072,1164075553371158,4025513310620190
# Those with mark journal.
JOURNAL_SEEDS ?= 2,7,23,46
# One run with another writer, whose messages would hide other defects from the rig.
WRITER_FAULTS ?= "another writer,relay killed,NATS killed,sessions terminated"
FOR ?= 1h

.PHONY: chaos
chaos: deps pg-extra ## break everything under a load, and count: a few minutes, fixed seeds (SEEDS=1,2)
	@. .ci/pgenv && go run ./internal/chaos -rows 5000 -faults 6 -parallel 8 -seeds $(SEEDS)
	@. .ci/pgenv && go run ./internal/chaos -rows 5000 -faults 6 -parallel 4 -seeds $(JOURNAL_SEEDS) -mark journal
	@. .ci/pgenv && go run ./internal/chaos -rows 5000 -faults 6 -only $(WRITER_FAULTS)

.PHONY: chaos-soak
chaos-soak: deps pg-extra ## the same with new seeds for as long as FOR says (1h), added to chaos.jsonl
	@. .ci/pgenv && go run ./internal/chaos -for $(FOR) -results chaos.jsonl

.PHONY: changes
changes: deps ## change names, tables, slots, streams between a relay's runs for as long as FOR says, added to changes.jsonl
	@. .ci/pgenv && WALPOST_TEST_ALL=1 WALPOST_CHANGES_FOR=$(FOR) WALPOST_CHANGES_RESULTS=$(CURDIR)/changes.jsonl \
		go test -count 1 -timeout 0 -run '^TestChanges$$' ./relay

.PHONY: model
model: deps ## do to an append-only table what people do, for as long as FOR says, added to model.jsonl
	@. .ci/pgenv && WALPOST_TEST_ALL=1 WALPOST_CHANGES_FOR=$(FOR) WALPOST_CHANGES_RESULTS=$(CURDIR)/model.jsonl \
		go test -count 1 -timeout 0 -v -run '^TestAppendOnlyModel$$' ./relay

.PHONY: bench
bench: deps ## measure on private servers: rates, latency, CPU time, memory (ARGS="--rows 100000")
	@. .ci/pgenv && go run ./internal/benchmark -- $(ARGS)

.PHONY: bench-check
bench-check: deps ## count what the relay allocates for a row, against the committed figures
	@. .ci/pgenv && go run ./internal/benchcheck

.PHONY: house
house: ## measure the source: its size, its packages, its words (ARGS="-path ../before .")
	@. .ci/pgenv && go run ./internal/house/measure $(ARGS)

.PHONY: mutants
mutants: deps pg-extra ## plant known defects in the relay, one after the other, and see each noticed
	@. .ci/pgenv && go run ./internal/chaos -rows 5000 -faults 6 -parallel 4 -mutants all

.PHONY: deps
deps: ## install what is missing: PostgreSQL's server programs, a C compiler, a pooler, Python, a browser
	@.ci/deps postgres cc pgbouncer python3 chromium

.PHONY: pg-extra
pg-extra: ## fetch further PostgreSQL versions for the tests, where that is possible
	@.ci/fetch-postgres

.PHONY: examples
examples: ## fetch what the tests of the examples need: modules of Node.js, psycopg
	@.ci/deps examples

.PHONY: clean
clean: ## remove what was built and fetched
	@if [ -d .cache ]; then chmod -R u+w .cache; fi
	rm -rf bin dist .cache
