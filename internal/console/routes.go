package console

import (
	"net/http"
)

// ask answers a request with a value that becomes JSON.
type ask func(http.ResponseWriter, *http.Request) (any, error)

// routes are the page, the API and the documentation.
func (c *Console) routes() http.Handler {
	mux := http.NewServeMux()
	for path, read := range map[string]ask{
		"overview":         c.overview,
		"series":           c.series,
		"sessions":         c.sessions,
		"held":             c.held,
		"deadletters":      c.deadLetters,
		"deadletters/{id}": c.deadLetter,
		"consumers":        c.consumers,
		"replays":          c.replays,
		"alarms":           c.alarms,
		"doctor":           c.doctor,
	} {
		mux.Handle("/ui/api/"+path, c.get(func(w http.ResponseWriter, r *http.Request) {
			value, err := read(w, r)
			answer(w, value, err)
		}))
	}
	mux.Handle("/ui/api/tail", c.get(c.tail))
	for path, change := range map[string]ask{
		"deadletters/retry":   c.retry,
		"deadletters/discard": c.discard,
		"replay/preview":      c.previewReplay,
		"replay":              c.requestReplay,
		"replays/{id}/cancel": c.cancelReplay,
	} {
		mux.Handle("/ui/api/"+path, c.post(change))
	}
	mux.Handle("/ui/api/", c.api(func(w http.ResponseWriter, r *http.Request) {
		answer(w, nil, refuse(http.StatusNotFound, "docs/CONSOLE.md has the routes",
			"the console's API has no %q", r.URL.Path))
	}))
	mux.Handle("/ui/docs/", c.cfg.Docs)
	mux.Handle("/ui/", page())
	return mux
}

// api lets in who holds the token.
func (c *Console) api(serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := c.mayRead(w, r); err != nil {
			answer(w, nil, err)
			return
		}
		serve(w, r)
	})
}

func (c *Console) get(serve http.HandlerFunc) http.Handler {
	return c.api(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			answer(w, nil, wrongMethod(w, r, http.MethodGet))
			return
		}
		serve(w, r)
	})
}

func (c *Console) post(change ask) http.Handler {
	return c.api(func(w http.ResponseWriter, r *http.Request) {
		var value any
		err := error(nil)
		if r.Method != http.MethodPost {
			err = wrongMethod(w, r, http.MethodPost)
		}
		if err == nil {
			err = c.mayChange(r)
		}
		if err == nil {
			value, err = change(w, r)
		}
		answer(w, value, err)
	})
}

func wrongMethod(w http.ResponseWriter, r *http.Request, want string) error {
	w.Header().Set("Allow", want)
	return refuse(http.StatusMethodNotAllowed, "send "+want, "%s does not take %s", r.URL.Path, r.Method)
}
