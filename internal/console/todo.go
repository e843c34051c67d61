package console

import "net/http"

func todo(http.ResponseWriter, *http.Request) (any, error) {
	return nil, refuse(http.StatusNotImplemented, "use the walpost command meanwhile", "not there yet")
}

func (c *Console) overview(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) series(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) sessions(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) held(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) deadLetters(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) deadLetter(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) consumers(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) replays(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) alarms(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) doctor(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) retry(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) discard(w http.ResponseWriter, r *http.Request) (any, error) { return todo(w, r) }

func (c *Console) previewReplay(w http.ResponseWriter, r *http.Request) (any, error) {
	return todo(w, r)
}

func (c *Console) requestReplay(w http.ResponseWriter, r *http.Request) (any, error) {
	return todo(w, r)
}

func (c *Console) cancelReplay(w http.ResponseWriter, r *http.Request) (any, error) {
	return todo(w, r)
}

func (c *Console) tail(w http.ResponseWriter, r *http.Request) {
	_, err := todo(w, r)
	answer(w, nil, err)
}
