package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// TestDataDirectoriesAreKept: a second process, which the emptied workspace stands for, starts from the first
// one's data directory.
func TestDataDirectoriesAreKept(t *testing.T) {
	t.Setenv(EnvKept, t.TempDir())
	pg := NewPostgres(t, PGOptions{})
	kept, err := keptPath("initdb", pg.bin.Dir, pg.bin.Version, fmt.Sprint(initdbArgs))
	check(t, err)
	mark := filepath.Join(kept, "kept")
	check(t, os.WriteFile(mark, nil, 0o600))
	space.mu.Lock()
	clear(space.clusters)
	space.mu.Unlock()
	second := NewPostgres(t, PGOptions{})
	if _, err := os.Stat(filepath.Join(second.Dir(), "kept")); err != nil {
		t.Errorf("the second cluster is not a copy of the kept directory: %v", err)
	}
	space.mu.Lock()
	clear(space.clusters) // the folder goes with this test
	space.mu.Unlock()
}

// TestNothingCanBeKept: the folder cannot be made, and the servers start all the same.
func TestNothingCanBeKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(file, nil, 0o600))
	t.Setenv(EnvKept, file)
	space.mu.Lock()
	clear(space.clusters)
	space.mu.Unlock()
	NewPostgres(t, PGOptions{})
	if _, err := build(t.Context(), "github.com/walpost/walpost/internal/testenv/pgversions"); err != nil {
		t.Error(err)
	}
}

// TestKeptByOneOfMany: of processes that make the same at the same time one wins, and what it made is whole.
func TestKeptByOneOfMany(t *testing.T) {
	t.Setenv(EnvKept, t.TempDir())
	kept, err := keptPath("initdb", "x")
	check(t, err)
	from := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		check(t, os.WriteFile(filepath.Join(from, name), nil, 0o600))
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := keepTree(kept, from); err != nil {
				t.Error(err)
			}
			if files, err := os.ReadDir(kept); err != nil || len(files) != 3 {
				t.Errorf("%d files: %v", len(files), err)
			}
		})
	}
	all.Wait()
	if left, err := os.ReadDir(filepath.Dir(kept)); err != nil || len(left) != 1 {
		t.Errorf("%d entries are left beside: %v", len(left), err)
	}
}

// TestProgramsAreKept: a second build finds the first one's program, and copies it.
func TestProgramsAreKept(t *testing.T) {
	const pkg = "github.com/walpost/walpost/internal/testenv/pgversions"
	t.Setenv(EnvKept, t.TempDir())
	kept, err := keptPath("program", pkg)
	check(t, err)
	var files []os.FileInfo
	for range 2 {
		built, err := build(t.Context(), pkg)
		check(t, err)
		if _, err := os.Stat(built); err != nil {
			t.Error(err)
		}
		info, err := os.Stat(kept)
		check(t, err)
		files = append(files, info)
	}
	if !os.SameFile(files[0], files[1]) { // linking replaces the file
		t.Error("the program was linked twice")
	}
}

// TestCopiesOfADatabase: it is prepared once in the shared cluster, and each test has one of its own.
func TestCopiesOfADatabase(t *testing.T) {
	pg, prepared := SharedPostgres(t), 0
	prepare := func(url string) {
		prepared++
		execURL(t, url, "CREATE TABLE t (n int)")
	}
	func() {
		defer func() { _ = recover() }()
		pg.CopyDB(t, "key", func(string) { panic("this one fails") })
	}()
	a, b := pg.CopyDB(t, "key", prepare), pg.CopyDB(t, "key", prepare)
	execURL(t, a, "INSERT INTO t VALUES (1)")
	execURL(t, b, "ALTER TABLE t RENAME TO u")
	pg.CopyDB(t, "another key", prepare)
	if a == b || prepared != 2 {
		t.Errorf("%s and %s, prepared %d times", a, b, prepared)
	}
}

func execURL(t *testing.T, url, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	check(t, err)
	_, err = conn.Exec(t.Context(), sql)
	check(t, errors.Join(err, conn.Close(t.Context())))
}

// TestTurns: within a week of days each heavy test runs in full once, and WALPOST_TEST_ALL runs all.
func TestTurns(t *testing.T) {
	for _, name := range []string{"TestA", "TestB/pg18.4"} {
		times := 0
		for _, turn := range []string{"20000", "20001", "20002", "20003", "20004", "20005", "20006"} {
			if full(name, "", turn) {
				times++
			}
		}
		if times != 1 || !full(name, "1", "") || full(name, "", "") || full(name, "", "today") {
			t.Errorf("%s has %d turns in a week", name, times)
		}
	}
}

// TestSomeCases: so many of the cases are chosen, in their order, and each within as many days as there are cases.
func TestSomeCases(t *testing.T) {
	all := []int{0, 1, 2, 3, 4, 5, 6, 7, 8}
	for n := 1; n < len(all); n++ {
		met := map[int]bool{}
		for turn := range uint64(len(all)) {
			chosen := some("TestA", turn, n, all)
			if len(chosen) != n || !slices.IsSorted(chosen) {
				t.Errorf("%d of nine on day %d: %v", n, turn, chosen)
			}
			for _, i := range chosen {
				met[i] = true
			}
		}
		if len(met) != len(all) {
			t.Errorf("%d of nine: only %d are ever met", n, len(met))
		}
	}
}
