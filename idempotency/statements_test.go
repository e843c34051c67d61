package idempotency_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// documented are the statements of the manual for other languages: claim, store, read.
func documented(t *testing.T) []string {
	t.Helper()
	page, err := os.ReadFile("../docs/IDEMPOTENCY.md")
	must(t, err)
	_, section, _ := strings.Cut(string(page), "\n## Other languages\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var statements []string
	for _, m := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		statements = append(statements, m[1])
	}
	if len(statements) != 3 {
		t.Fatalf("the manual has %d statements, want 3", len(statements))
	}
	return statements
}

var errDifferent, errWork = errors.New("the key was used for another request"), errors.New("the work fails")

// request does what the manual says.
func (b *bench) request(statements []string, key, body string, work func(pgx.Tx) error) (answer string, err error) {
	ctx := context.Background()
	err = pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		of := []any{0, "ann POST /orders", key}
		tag, err := tx.Exec(ctx, statements[0], append(of, []byte(body))...)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			var same bool
			var status int
			var stored []byte
			if err := tx.QueryRow(ctx, statements[2], append(of, []byte(body))...).Scan(&same, &status, &stored); err != nil {
				return err
			}
			if answer = string(stored); !same || status != 201 {
				return errDifferent
			}
			return nil
		}
		var id string
		if err := tx.QueryRow(ctx, `INSERT INTO effects (note) VALUES ('x') RETURNING id::text`).Scan(&id); err != nil {
			return err
		}
		if err := work(tx); err != nil {
			return err
		}
		answer = "order " + id
		_, err = tx.Exec(ctx, statements[1], append(of, 201, []byte(answer))...)
		return err
	})
	return answer, err
}

// TestOtherLanguages: the statements of the manual execute a request once, also where its repetitions come while it is
// executed, and again where it failed.
func TestOtherLanguages(t *testing.T) {
	b, statements := newBench(t), documented(t)
	done := func(pgx.Tx) error { return nil }
	if _, err := b.request(statements, "k1", "{}", func(pgx.Tx) error { return errWork }); !errors.Is(err, errWork) {
		t.Fatalf("a request that fails: %v", err)
	}
	b.wantEffects(0)
	var wg sync.WaitGroup
	answers := make([]string, 8)
	for i := range answers {
		wg.Go(func() {
			var err error
			if answers[i], err = b.request(statements, "k1", "{}", done); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b.wantEffects(1)
	b.wantRow("completed 201")
	for _, a := range answers {
		if a != answers[0] || !strings.HasPrefix(a, "order ") {
			t.Errorf("the answers are %q", answers)
		}
	}
	if _, err := b.request(statements, "k1", `{"other": 1}`, done); !errors.Is(err, errDifferent) {
		t.Errorf("another request with the key: %v", err)
	}
	if _, err := b.request(statements, "k2", "{}", done); err != nil {
		t.Error(err)
	}
	b.wantEffects(2)
}
