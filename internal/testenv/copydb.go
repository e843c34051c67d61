package testenv

import (
	"fmt"
	"sync"
	"testing"
)

// original is a database that was prepared once, to be copied.
type original struct {
	mu   sync.Mutex // is held while it is made
	name string     // is empty until it is prepared
}

// CopyDB returns the URL of a database that prepare has made what the test needs: its migrations, as a rule.
// In the shared cluster prepare runs once for a key, and further databases are copies: that takes a tenth of
// the time.
func (p *Postgres) CopyDB(tb testing.TB, key string, prepare func(url string)) string {
	tb.Helper()
	p.mu.Lock()
	if p.originals == nil {
		p.mu.Unlock()
		url := p.NewDB(tb)
		prepare(url)
		return url
	}
	o := p.originals[key]
	if o == nil {
		o = new(original)
		p.originals[key] = o
	}
	p.serial++
	name, copied := fmt.Sprintf("original%d", p.serial), fmt.Sprintf("test%d", p.serial)
	p.mu.Unlock()

	o.mu.Lock()
	defer o.mu.Unlock() // one copy at a time: each writes two checkpoints
	if o.name == "" {
		url, err := p.CreateDB(tb.Context(), name)
		check(tb, err)
		prepare(url) // does not return where it fails: the next test has another original
		o.name = name
	}
	sql := fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", copied, o.name)
	if p.bin.Major >= 15 {
		sql += " STRATEGY file_copy" // and not each page as a record in the WAL, which every slot would read
	}
	check(tb, p.Exec(tb.Context(), "postgres", sql))
	return p.URL(copied)
}
