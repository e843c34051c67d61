package docs

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the chart's schema again")

// TestChartRefusesUnknownKeys: values.schema.json has the program's keys and no others, so that Helm itself refuses a
// config.natz.url.
func TestChartRefusesUnknownKeys(t *testing.T) {
	const file = "deploy/helm/walpost/values.schema.json"
	config := object()
	for _, s := range settings(walpost(t, "config", "example")) {
		config.add(strings.Split(s.key, "."))
	}
	// What an entry says goes over the values of the same name. These are the release's alone.
	entry := map[string]any{"name": map[string]any{"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$"}}
	for name := range document(t, "deploy/helm/walpost/values.yaml").any.(map[string]any) {
		if name != "databases" && name != "image" && name != "prometheusRule" {
			entry[name] = map[string]any{}
		}
	}
	entry["config"] = map[string]any{"$ref": "#/properties/config"}
	want, err := json.MarshalIndent(map[string]any{
		"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": map[string]any{
			"config": config,
			"databases": map[string]any{"type": "array", "items": map[string]any{
				"type": "object", "required": []string{"name"}, "properties": entry, "additionalProperties": false,
			}},
		},
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(filepath.Join(root, file), append(want, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, file) != string(want)+"\n" {
		t.Errorf("%s does not have the program's keys: run go test ./internal/docs -run ChartRefuses -update", file)
	}
}

// schema is a part of a JSON schema. A leaf allows any value: the program checks it.
type schema struct {
	Type       string             `json:"type,omitempty"`
	Properties map[string]*schema `json:"properties,omitempty"`
	Additional *bool              `json:"additionalProperties,omitempty"`
	Items      *schema            `json:"items,omitempty"`
}

func object() *schema {
	return &schema{Type: "object", Properties: map[string]*schema{}, Additional: new(bool)}
}

func (s *schema) add(path []string) {
	name, list := strings.CutSuffix(path[0], "[]")
	if len(path) == 1 {
		s.Properties[name] = &schema{}
		return
	}
	next := s.Properties[name]
	switch {
	case next == nil && list:
		next = &schema{Type: "array", Items: object()}
	case next == nil:
		next = object()
	}
	s.Properties[name] = next
	if list {
		next = next.Items
	}
	next.add(path[1:])
}

// TestMigrationsGrant: a first installation has to end with a relay that runs.
func TestMigrationsGrant(t *testing.T) {
	hook := read(t, "deploy/helm/walpost/templates/migrate.yaml")
	if !strings.Contains(hook, `(printf "--grant=%s" .Values.relayRole)`) || !strings.Contains(hook, "helm.sh/hook: pre-install,pre-upgrade") {
		t.Error("the chart's hook does not grant")
	}
	if role := document(t, "deploy/helm/walpost/values.yaml").at("relayRole").text(); role != "walpost" {
		t.Errorf("the chart grants to %q", role)
	}
	job := document(t, "deploy/kubernetes/migrate.yaml").at("spec", "template", "spec", "containers", 0, "args")
	if got := job.at(2).text(); got != "--grant=walpost" {
		t.Errorf("deploy/kubernetes/migrate.yaml has %q where it should grant", got)
	}
	if !strings.Contains(walpost(t, "migrate", "up", "--help"), "--grant ROLE") {
		t.Error("walpost migrate up knows no --grant")
	}
}
