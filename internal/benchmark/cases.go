package main

// measured is one result that is kept: what walpost bench is told, and on which servers.
type measured struct {
	name, title string
	servers
	args []string
}

// servers are what a measurement is done on.
type servers struct {
	replicas int  // NATS servers
	always   bool // NATS flushes each write
	tls      bool // to PostgreSQL
}

// nothing is what every case begins with. It names what it measures besides drains.
var nothing = []string{"--latency", "0", "--cost", "0", "--producers", "0", "--retained", "0"}

// cases are the results of docs/BENCHMARKS.md.
var cases = []measured{
	{"tx100", "100 rows in each transaction, 300 bytes", servers{}, []string{
		"--rows", "300000", "--latency", "100,1000,5000,10000", "--binary",
	}},
	{"tx1", "One row in each transaction, 300 bytes", servers{}, []string{
		"--rows", "300000", "--per-transaction", "1", "--marks", "journal", "--runs", "5",
	}},
	{"onetx", "One transaction of a million rows", servers{}, []string{
		"--rows", "1000000", "--per-transaction", "1000000", "--marks", "journal", "--runs", "1",
	}},
	{"backlog", "A backlog of ten million rows", servers{}, []string{
		"--rows", "10000000", "--marks", "journal",
	}},
	{"bytes2k", "Payloads of 2 kB", servers{}, []string{
		"--rows", "100000", "--payload", "2000", "--marks", "journal",
	}},
	{"bytes50k", "Payloads of 50 kB", servers{}, []string{
		"--rows", "8000", "--payload", "50000", "--per-transaction", "10", "--marks", "journal",
	}},
	{"tls", "TLS to PostgreSQL", servers{tls: true}, []string{
		"--rows", "300000", "--marks", "journal",
	}},
	{"syncalways", "sync_interval: always", servers{always: true}, []string{
		"--rows", "100000", "--marks", "journal", "--batches", "single,fast,atomic",
	}},
	{"r3", "Three replicas", servers{replicas: 3}, []string{
		"--rows", "300000", "--marks", "journal", "--batches", "single,fast,atomic", "--replicas", "3",
	}},
	{"shards", "Several relays, 300 bytes", servers{}, []string{
		"--rows", "300000", "--marks", "journal", "--batches", "fast", "--shards", "1,2,4",
	}},
	{"backlog2m", "A backlog of ten million rows, and a duplicate window of two minutes", servers{}, []string{
		"--rows", "10000000", "--marks", "journal", "--batches", "single", "--runs", "1",
		"--duplicate-window", "2m",
	}},
	{"cost", "What an event costs the database", servers{}, []string{
		"--runs", "0", "--cost", "300000",
	}},
	{"producers", "What a relay costs producers, and how soon their events are stored", servers{}, []string{
		"--runs", "0", "--latency", "1000", "--producers", "8", "--for", "20s",
	}},
	{"retained", "The size of an append-only outbox under retention", servers{}, []string{
		"--runs", "0", "--marks", "journal", "--retained", "50000000",
	}},
}
