// Package docs holds the documents against the program: a table, a list or a
// name that is written twice is compared here, so that it cannot drift.
package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const root = "../.."

// documents are all Markdown files, as paths from the root. The runbooks of alarms are read as parts of the page
// that is made from them.
var documents = markdown()

func markdown() (files []string) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || path == filepath.Join(root, runbooks)) {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			path, err = filepath.Rel(root, path)
			files = append(files, filepath.ToSlash(path))
		}
		return err
	})
	if err != nil || len(files) < 10 {
		panic(fmt.Sprintf("found %d Markdown files: %v", len(files), err))
	}
	return files
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// section is the text under a heading, up to the next one of its level or above.
func section(t *testing.T, file, heading string) string {
	t.Helper()
	_, text, found := strings.Cut("\n"+read(t, file), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", file, heading)
	}
	level := len(heading) - len(strings.TrimLeft(heading, "#"))
	end := regexp.MustCompile(fmt.Sprintf(`(?m)^#{1,%d} `, level)).FindStringIndex(text)
	if end != nil {
		text = text[:end[0]]
	}
	return text
}

// rows are the cells of the tables in a text whose first cell is code, without
// the backquotes.
func rows(text string) (all [][]string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i, c := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(c), "`")
		}
		all = append(all, cells)
	}
	return all
}

// same compares what a document says with what the code says, both ways.
func same(t *testing.T, file string, documented, coded []string) {
	t.Helper()
	if len(coded) == 0 {
		t.Fatalf("found nothing in the code that %s could be compared with", file)
	}
	for _, name := range coded {
		if !slices.Contains(documented, name) {
			t.Errorf("%s lacks %s", file, name)
		}
	}
	for i, name := range documented {
		if !slices.Contains(coded, name) {
			t.Errorf("%s tells of %s, which the code does not have", file, name)
		}
		if slices.Contains(documented[:i], name) {
			t.Errorf("%s tells of %s twice", file, name)
		}
	}
}

// arguments are the string literals that stand as argument n in the calls of
// the named functions in one directory, tests left out.
func arguments(t *testing.T, dir string, n int, functions ...string) (all []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(node ast.Node) bool {
			if s, ok := argument(node, n, functions); ok && !slices.Contains(all, s) {
				all = append(all, s)
			}
			return true
		})
	}
	return all
}

func argument(node ast.Node, n int, functions []string) (string, bool) {
	call, ok := node.(*ast.CallExpr)
	if !ok || len(call.Args) <= n {
		return "", false
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains(functions, f.Sel.Name) {
		return "", false
	}
	lit, ok := call.Args[n].(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// scratch is a directory for as long as the tests run.
var scratch string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if scratch, err = os.MkdirTemp("", "walpost-docs-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratch)
	return m.Run()
}

// program builds walpost once.
var program = sync.OnceValues(func() (string, error) {
	bin := filepath.Join(scratch, "walpost")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", bin, "./cmd/walpost")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build walpost: %w\n%s", err, out)
	}
	return bin, nil
})

func walpost(t *testing.T, args ...string) string {
	t.Helper()
	bin, err := program()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, args...)
	cmd.Dir = t.TempDir() // where no walpost.yaml is
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("walpost %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	headings := map[string][]string{}
	for _, file := range documents {
		for _, m := range link.FindAllStringSubmatch(read(t, file), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s: %v", file, m[1], err)
				continue
			}
			if anchor != "" && headings[target] == nil {
				headings[target] = anchors(read(t, target))
			}
			if anchor != "" && !slices.Contains(headings[target], anchor) {
				t.Errorf("%s links to %s: no such heading", file, m[1])
			}
		}
	}
}

var (
	headingLine = regexp.MustCompile(`(?m)^#+ (.*)$`)
	codeBlock   = regexp.MustCompile("(?ms)^```.*?^```")
	noAnchor    = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// anchors are the headings as links name them: the second of two alike ends in -1.
func anchors(text string) (all []string) {
	seen := map[string]int{}
	for _, m := range headingLine.FindAllStringSubmatch(codeBlock.ReplaceAllString(text, ""), -1) {
		name := strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")
		if seen[name]++; seen[name] > 1 {
			name += "-" + strconv.Itoa(seen[name]-1)
		}
		all = append(all, name)
	}
	return all
}

var (
	testName = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	testRef  = regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz|Benchmark)[A-Z]\\w*)`")
	testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)[A-Z]\w*)\(`)
)

// TestNamedTestsExist: a test is named by its directory and its function, as in
// `relay.TestX`.
func TestNamedTestsExist(t *testing.T) {
	exist := testsOf(t)
	for _, file := range documents {
		text := read(t, file)
		refs := testRef.FindAllStringSubmatch(text, -1)
		for _, m := range refs {
			if !exist[m[1]+"."+m[2]] {
				t.Errorf("%s names the test %s.%s, which does not exist", file, m[1], m[2])
			}
		}
		if n := len(testName.FindAllString(text, -1)); n != len(refs) {
			t.Errorf("%s names %d tests, only %d of them as `directory.TestName`", file, n, len(refs))
		}
	}
}

func testsOf(t *testing.T) map[string]bool {
	t.Helper()
	exist := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || path == filepath.Join(root, runbooks)) {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		for _, m := range testFunc.FindAllStringSubmatch(string(b), -1) {
			exist[filepath.ToSlash(dir)+"."+m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return exist
}

var makeTarget = regexp.MustCompile("(?m)(?:`|^)make ([a-z-]+)")

func TestMakeTargetsExist(t *testing.T) {
	makefile := "\n" + read(t, "Makefile")
	for _, file := range documents {
		for _, m := range makeTarget.FindAllStringSubmatch(read(t, file), -1) {
			if !strings.Contains(makefile, "\n"+m[1]+":") {
				t.Errorf("%s tells to run make %s, which the Makefile does not have", file, m[1])
			}
		}
	}
}

var (
	command = regexp.MustCompile("`walpost ((?:[a-z]+(?:-[a-z]+)* ?)+)")
	shell   = regexp.MustCompile("(?ms)^```sh\n(.*?)^```")
	typed   = regexp.MustCompile(`(?m)^(?:[A-Z_]+=\S+ )*walpost ((?:[a-z]+(?:-[a-z]+)* ?)+)`)
)

// TestCommandsExist leaves out what is said not to exist yet.
func TestCommandsExist(t *testing.T) {
	exist := map[string]bool{}
	for _, file := range documents {
		text := read(t, file)
		if file == "README.md" {
			text = strings.Replace(text, section(t, file, "## Not there yet"), "", 1)
		}
		found := command.FindAllStringSubmatch(text, -1)
		for _, block := range shell.FindAllString(text, -1) {
			found = append(found, typed.FindAllStringSubmatch(block, -1)...)
		}
		for _, m := range found {
			words := strings.Fields(m[1])
			name := strings.Join(words, " ")
			if _, known := exist[name]; !known {
				exist[name] = strings.Contains(walpost(t, append(words, "--help")...), "walpost "+name)
			}
			if !exist[name] {
				t.Errorf("%s tells of `walpost %s`, which does not exist", file, name)
			}
		}
	}
}
