package console

import (
	"embed"
	"io/fs"
	"net/http"
	"path"
	"strings"
)

//go:embed page
var pageFiles embed.FS

// pageTypes are the types of the page's files. A browser is told not to guess.
var pageTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
	".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png",
	".woff2": "font/woff2", ".txt": "text/plain; charset=utf-8",
}

// page serves the embedded files. It needs no token: they tell nothing.
func page() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/ui/")
		if name == "" {
			name = "index.html"
		}
		kind := pageTypes[path.Ext(name)]
		text, err := fs.ReadFile(pageFiles, "page/"+name)
		if err != nil || kind == "" {
			answer(w, nil, refuse(http.StatusNotFound, "the console is at /ui/",
				"there is no %q", r.URL.Path))
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			answer(w, nil, wrongMethod(w, r, http.MethodGet))
			return
		}
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(text)
	})
}
