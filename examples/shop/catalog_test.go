package shop_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/examples/shop"
)

// TestCatalogue: the shop's catalogue keeps the rules, with one doubt that its entry explains, its documents
// are up to date, and the shop's payloads fit.
func TestCatalogue(t *testing.T) {
	events, problems := catalog.Check(os.DirFS("catalog"))
	if len(problems) != 1 || problems[0].Level != catalog.Warn || problems[0].Code != "catalog-name" {
		t.Errorf("found %v", problems)
	}
	asyncAPI, err := events.AsyncAPI(catalog.AsyncAPIOptions{Subject: "events.{event_type}"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]byte{"event-catalog.md": events.Markdown(), "asyncapi.yaml": asyncAPI} {
		got, err := os.ReadFile("docs/" + name)
		if err != nil || string(got) != string(want) {
			t.Errorf("docs/%s is out of date (%v): run go run ./cmd/walpost catalog docs examples/shop/catalog "+
				"--out examples/shop/docs", name, err)
		}
	}
	placed := shop.Order{ID: 1, PublicID: "0b0e7a52-6a0f-4c69-9d0d-1f4f3f1d2c3b", Total: 1250, State: "placed", Version: 1}
	paid := placed
	paid.State, paid.Version = "paid", 2
	for name, c := range map[string]shop.Change{
		"order.placed": {After: placed}, "order.changed": {Before: &placed, After: paid}, "order.paid": {Before: &placed, After: paid},
	} {
		payload, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		if err := events.Validate(name, 1, payload); err != nil {
			t.Error(err)
		}
		c.After.PublicID = "none"
		if payload, err = json.Marshal(c); err != nil {
			t.Fatal(err)
		}
		if events.Validate(name, 1, payload) == nil {
			t.Errorf("%s takes %s", name, payload)
		}
	}
}
