package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/walpost/walpost/internal/hint"
)

const (
	relayPatience = 2 * time.Second
	mostOfRelay   = 8 << 20 // bytes of an answer
)

// RelayAt reads the status and the metrics of a relay in another process, from its HTTP server. Without a
// URL there is none.
func RelayAt(base string) (
	status func(context.Context) (json.RawMessage, error),
	metrics func(context.Context) ([]*dto.MetricFamily, error),
) {
	// No proxy: the server is inside.
	client := &http.Client{Timeout: relayPatience, Transport: &http.Transport{IdleConnTimeout: time.Minute}}
	read := func(ctx context.Context, path string, use func(io.Reader) error) error {
		if base == "" {
			return hint.Errorf("give --relay with its URL", "http.listen is off: the relay cannot be asked")
		}
		err := get(ctx, client, base+path, use)
		return hint.Wrap(err, "start the relay, or give --relay with the URL of its HTTP server")
	}
	status = func(ctx context.Context) (raw json.RawMessage, err error) {
		err = read(ctx, "/status", func(body io.Reader) error { return json.NewDecoder(body).Decode(&raw) })
		return raw, err
	}
	metrics = func(ctx context.Context) (all []*dto.MetricFamily, err error) {
		err = read(ctx, "/metrics", func(body io.Reader) error {
			parser := expfmt.NewTextParser(model.UTF8Validation)
			families, err := parser.TextToMetricFamilies(body)
			for _, f := range families {
				all = append(all, f)
			}
			return err
		})
		return all, err
	}
	return status, metrics
}

func get(ctx context.Context, client *http.Client, url string, use func(io.Reader) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("ask the relay: %w", err)
		}
	}()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // it was read
	if response.StatusCode != http.StatusOK {
		return errors.New(url + " answers " + response.Status)
	}
	return use(io.LimitReader(response.Body, mostOfRelay))
}
