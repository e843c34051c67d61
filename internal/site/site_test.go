package site

import (
	"html"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/walpost/walpost"
)

const root = "../.."

func rendered(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := New(walpost.Documents, "v1.2.3", "0123456789ab").files()
	if err != nil {
		t.Fatal(err)
	}
	return files
}

var (
	idOf      = regexp.MustCompile(` id="([^"]*)"`)
	reference = regexp.MustCompile(` (href|src)="([^"]*)"`)
)

// TestEveryLinkLeadsSomewhere follows all links of all pages: to a file of the site and an id in it, or to a file
// of the repository.
func TestEveryLinkLeadsSomewhere(t *testing.T) {
	files := rendered(t)
	ids := map[string]bool{}
	for name, content := range files {
		for _, m := range idOf.FindAllSubmatch(content, -1) {
			id := name + "#" + html.UnescapeString(string(m[1]))
			if ids[id] {
				t.Errorf("%s has the id twice", id)
			}
			ids[id] = true
		}
	}
	followed := 0
	for name, content := range files {
		if path.Ext(name) != ".html" {
			continue
		}
		for _, m := range reference.FindAllSubmatch(content, -1) {
			followed++
			follow(t, files, ids, name, string(m[1]), html.UnescapeString(string(m[2])))
		}
	}
	if followed < 1000 {
		t.Errorf("followed only %d links", followed)
	}
}

func follow(t *testing.T, files map[string][]byte, ids map[string]bool, page, attribute, link string) {
	t.Helper()
	if file, found := strings.CutPrefix(link, repository+"v1.2.3/"); found {
		file, _, _ = strings.Cut(file, "#")
		if _, err := os.Stat(filepath.Join(root, file)); err != nil {
			t.Errorf("%s links to %s: %v", page, link, err)
		}
		return
	}
	u, err := url.Parse(link)
	switch {
	case err != nil:
		t.Errorf("%s links to %s: %v", page, link, err)
	case u.IsAbs() && (attribute == "src" || u.Scheme != "https" && u.Scheme != "http"):
		t.Errorf("%s loads or links to %s", page, link)
	case u.IsAbs():
	case strings.HasPrefix(u.Path, "/"):
		t.Errorf("%s links to %s, which is not relative", page, link)
	default:
		if u.Path == "" {
			u.Path = page
		}
		if files[u.Path] == nil || u.Fragment != "" && !ids[u.Path+"#"+u.Fragment] {
			t.Errorf("%s links to %s, which the site does not have", page, link)
		}
	}
}

// TestNothingIsInline: the policy refuses scripts and styles in a page, and requests to other servers.
func TestNothingIsInline(t *testing.T) {
	inline := regexp.MustCompile(`<style|<script>|<script [^>]*>[^<]| style="| on[a-z]+="|javascript:`)
	external := regexp.MustCompile(`(?i)(?:src="|url\(|@import |fetch\()[^)"]*//`)
	for name, content := range rendered(t) {
		if path.Ext(name) == ".html" {
			for _, found := range inline.FindAll(content, -1) {
				t.Errorf("%s has %s", name, found)
			}
			if !strings.Contains(string(content), `<meta http-equiv="Content-Security-Policy" content="default-src 'none';`) {
				t.Errorf("%s has no policy", name)
			}
			if !strings.Contains(string(content), ">v1.2.3</span>") {
				t.Errorf("%s does not show the version", name)
			}
		}
		if name != "search.js" && external.Match(content) {
			t.Errorf("%s loads something from another server: %s", name, external.Find(content))
		}
	}
}

// TestEveryDocumentIsAPage compares with the checkout, so that no document is forgotten in embed.go.
func TestEveryDocumentIsAPage(t *testing.T) {
	files := rendered(t)
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "examples/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v, %v", pattern, found, err)
		}
		for _, file := range found {
			source, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			if files[siteFile(filepath.ToSlash(source))] == nil {
				t.Errorf("%s is not in the site", source)
			}
		}
	}
	for _, name := range []string{"index.html", "ALARMS.html", "deploy.html", "examples-insert.html", "benchmarks/tx100.svg"} {
		if files[name] == nil {
			t.Errorf("%s is not in the site", name)
		}
	}
	if !strings.Contains(string(files["ALARMS.html"]), ` id="events_lost"`) {
		t.Error("ALARMS.html has no events_lost")
	}
}

func TestAnchorsAreThoseOfGitHub(t *testing.T) {
	for heading, want := range map[string]string{
		"events_lost":              "events_lost",
		"A slot, made by hand":     "a-slot-made-by-hand",
		"What isn't (yet) there?":  "what-isnt-yet-there",
		"1.2.3 - 2026":             "123---2026",
		"Größe":                    "größe",
		"`nats.tls.ca`, and more…": "natstlsca-and-more",
	} {
		if got := anchor(heading); got != want {
			t.Errorf("anchor(%q) = %q, want %q", heading, got, want)
		}
	}
}

func TestLinksInDocuments(t *testing.T) {
	documents := fstest.MapFS{
		"README.md": {Data: []byte("# walpost\n[a](docs/A.md#two) [b](deploy/) [c](docs/x.json) [d](https://example.com/)\n")},
		"docs/A.md": {Data: []byte("# A\n## Two\n## `Two`\n![p](benchmarks/p.svg) [r](../README.md) [s](#two-1)\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n")},
		"docs/M.md": {Data: []byte("# M\n```mermaid\nflowchart TB\n```\n```mermaid\nchanged\n```\n")},
		// sha256 of "flowchart TB\n"
		"docs/diagrams/e9d1c02e834b.svg": {Data: []byte("<svg/>")},
		"docs/benchmarks/p.svg":          {Data: []byte("<svg/>")},
		"deploy/README.md":               {Data: []byte("# Deploy\n[d](../docs/A.md) [e](Dockerfile)\n")},
		"examples/insert/README.md":      {Data: []byte("# Insert\n<b>&amp;</b> <script>alert(1)</script>\n")},
	}
	for _, c := range []struct{ version, revision, ref string }{
		{"v1.2.3", "0123456789ab", "v1.2.3"},
		{"v1.2.3-rc.1", "0123456789ab", "v1.2.3-rc.1"},
		{"v1.2.3-4-g0123456", "0123456789ab", "0123456789ab"},
		{"devel", "0123456789ab-dirty", "main"},
		{"devel", "unknown revision", "main"},
	} {
		files, err := New(documents, c.version, c.revision).files()
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string][]string{
			"index.html":           {`"A.html#two"`, `"deploy.html"`, `"` + repository + c.ref + `/docs/x.json"`, `"https://example.com/"`},
			"A.html":               {`src="benchmarks/p.svg"`, `href="index.html"`, `<h2 id="two">`, `<h2 id="two-1">`, `<td align="right">`},
			"M.html":               {`<img src="diagrams/e9d1c02e834b.svg" alt="Diagram">`, "changed\n</code>"},
			"deploy.html":          {`"A.html"`, `"` + repository + c.ref + `/deploy/Dockerfile"`},
			"examples-insert.html": {"<!-- raw HTML omitted -->"},
		} {
			for _, w := range want {
				if !strings.Contains(string(files[name]), w) {
					t.Errorf("%s: %s lacks %s:\n%s", c.version, name, w, files[name])
				}
			}
		}
	}
}

func TestHandler(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle("/ui/docs/", http.StripPrefix("/ui/docs/", New(walpost.Documents, "devel", "").Handler()))
	for _, c := range []struct {
		method, path string
		code         int
		kind, part   string
	}{
		{"GET", "/ui/docs/", 200, "text/html; charset=utf-8", "<title>walpost</title>"},
		{"GET", "/ui/docs/index.html", 200, "text/html; charset=utf-8", "<title>walpost</title>"},
		{"GET", "/ui/docs/ALARMS.html", 200, "text/html; charset=utf-8", "<title>Alarms and alerts - walpost</title>"},
		{"HEAD", "/ui/docs/ALARMS.html", 200, "text/html; charset=utf-8", ""},
		{"GET", "/ui/docs/site.js", 200, "text/javascript; charset=utf-8", "use strict"},
		{"GET", "/ui/docs/search.js", 200, "text/javascript; charset=utf-8", "window.walpostSections"},
		{"GET", "/ui/docs/site.css", 200, "text/css; charset=utf-8", "color-scheme"},
		{"GET", "/ui/docs/benchmarks/tx100.svg", 200, "image/svg+xml", "<svg"},
		{"GET", "/ui/docs/nothing.html", 404, "text/plain; charset=utf-8", "no such page"},
		{"GET", "/ui/docs/%2e%2e/%2e%2e/go.mod", 404, "text/plain; charset=utf-8", "no such page"},
		{"POST", "/ui/docs/", 405, "text/plain; charset=utf-8", "method not allowed"},
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(c.method, c.path, nil)
		if strings.Contains(c.path, "%") {
			http.StripPrefix("/ui/docs/", New(walpost.Documents, "devel", "").Handler()).ServeHTTP(w, r)
		} else {
			mux.ServeHTTP(w, r)
		}
		if w.Code != c.code || w.Header().Get("Content-Type") != c.kind || !strings.Contains(w.Body.String(), c.part) {
			t.Errorf("%s %s: %d %s", c.method, c.path, w.Code, w.Header().Get("Content-Type"))
		}
		if p := w.Header().Get("Content-Security-Policy"); !strings.HasPrefix(p, "default-src 'none'; script-src 'self'") || !strings.HasSuffix(p, "frame-ancestors 'none'") {
			t.Errorf("%s has the policy %q", c.path, p)
		}
	}
}

func TestWriteIsRepeatable(t *testing.T) {
	dirs := [2]string{t.TempDir(), filepath.Join(t.TempDir(), "new", "directory")}
	for _, dir := range dirs {
		n, err := New(walpost.Documents, "v1.2.3", "").Write(dir)
		if err != nil || n < 30 {
			t.Fatalf("wrote %d files: %v", n, err)
		}
	}
	for name := range rendered(t) {
		a, errA := os.ReadFile(filepath.Join(dirs[0], name))
		b, errB := os.ReadFile(filepath.Join(dirs[1], name))
		if errA != nil || errB != nil || string(a) != string(b) {
			t.Errorf("%s differs: %v, %v", name, errA, errB)
		}
	}
	if _, err := New(walpost.Documents, "", "").Write(filepath.Join(dirs[0], "index.html")); err == nil {
		t.Error("a file was taken as directory")
	}
}
