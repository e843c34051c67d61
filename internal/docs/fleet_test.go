package docs

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/walpost/walpost/internal/testenv"
)

// TestChartOfAFleet: Helm makes a relay for each database, with the release's values where its entry says nothing.
func TestChartOfAFleet(t *testing.T) {
	testenv.FullOnly(t)
	helm := filepath.Join(t.TempDir(), "helm")
	build := exec.CommandContext(t.Context(), "go", "build", "-C", "helm", "-o", helm, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the renderer: %v\n%s", err, out)
	}
	render := func(values string) (string, error) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), helm, filepath.Join(root, "deploy/helm/walpost"), file)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			err = errors.New(stderr.String())
		}
		return string(out), err
	}

	text, err := render(`
databases:
  - name: shop
    postgresSecret: {name: walpost-shop}
    config: {nats: {stream: SHOP, subject: "shop.{event_type}"}}
  - name: billing
    replicas: 3
    postgresSecret: {name: walpost-billing, key: url}
    ownerSecret: {name: ""}
    httpSecret: console
    config: {http: {ui: true, token_file: /etc/walpost-http/token}}
prometheusRule: {enabled: true}
`)
	if err != nil {
		t.Fatal(err)
	}
	objects := kubernetesObjects(t, text)
	for name, want := range map[string]bool{
		"Deployment/walpost-shop": true, "Deployment/walpost-billing": true, "Deployment/walpost": false,
		"ConfigMap/walpost-shop": true, "Service/walpost-billing": true, "NetworkPolicy/walpost-shop": true,
		"Job/walpost-shop-migrate": true, "Job/walpost-billing-migrate": false,
		"CronJob/walpost-shop-retention": true, "CronJob/walpost-billing-retention": false,
		"PrometheusRule/walpost": true, "PrometheusRule/walpost-shop": false,
	} {
		if _, found := objects[name]; found != want {
			t.Errorf("%s is there: %t, want %t", name, found, want)
		}
	}
	at := func(name string, path ...any) node { return node{t, name, objects[name]}.at(path...) }
	for name, want := range map[string]int{"shop": 2, "billing": 3} {
		d := "Deployment/walpost-" + name
		if got := at(d, "spec", "replicas").any; got != want {
			t.Errorf("%s has %v replicas, want %d", d, got, want)
		}
		pod := at(d, "spec", "template", "spec", "volumes")
		if got := pod.at(0, "configMap", "name").text(); got != "walpost-"+name {
			t.Errorf("%s reads the configuration %s", d, got)
		}
		if got := pod.at(1, "secret", "secretName").text(); got != "walpost-"+name {
			t.Errorf("%s reads the secret %s", d, got)
		}
		if got := at(d, "spec", "selector", "matchLabels", "app.kubernetes.io/instance").text(); got != "walpost-"+name {
			t.Errorf("%s selects %s", d, got)
		}
	}
	const billing = "Deployment/walpost-billing"
	volume := at(billing, "spec", "template", "spec", "volumes", 2)
	mount := at(billing, "spec", "template", "spec", "containers", 0, "volumeMounts", 2)
	http := at("ConfigMap/walpost-billing", "data", "walpost.yaml").text()
	if volume.at("secret", "secretName").text() != "console" || mount.at("name").text() != volume.at("name").text() ||
		!strings.Contains(http, "token_file: "+mount.at("mountPath").text()+"/token\n") {
		t.Errorf("the pod mounts %v as %v, and the configuration is\n%s", volume.any, mount.any, http)
	}
	if text := fmt.Sprint(objects["Deployment/walpost-shop"]); strings.Contains(text, "walpost-http") {
		t.Errorf("shop mounts what billing's entry says: %s", text)
	}
	config := at("ConfigMap/walpost-shop", "data", "walpost.yaml").text()
	if !strings.Contains(config, "stream: SHOP") || !strings.Contains(config, "url: tls://nats:4222") {
		t.Errorf("the configuration of shop is\n%s", config)
	}
	if config := at("ConfigMap/walpost-billing", "data", "walpost.yaml").text(); strings.Contains(config, "SHOP") {
		t.Errorf("the configuration of billing has what shop's says:\n%s", config)
	}

	if text, err = render("replicas: 1"); err != nil {
		t.Fatal(err)
	}
	if objects = kubernetesObjects(t, text); objects["Deployment/walpost"] == nil {
		t.Error("without databases there is no relay")
	}

	for values, want := range map[string]string{
		"databases: [{replicas: 1}]":                             "name",
		"databases: [{name: Shop}]":                              "name",
		"databases: [{name: a, postgresSecrets: {name: b}}]":     "postgresSecrets",
		"databases: [{name: a, config: {natz: {url: b}}}]":       "natz",
		"databases: [{name: a, config: {nats: {urls: [b, c]}}}]": "urls",
		"databases: [{name: a}, {name: b}, {name: a}]":           "a",
	} {
		if _, err := render(values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", values, err, want)
		}
	}

	// Helm keeps a release in a Secret, which Kubernetes limits to a mebibyte: its text packed, in base64 twice.
	var many strings.Builder
	many.WriteString("databases:\n")
	const most = 1000
	for n := range most {
		fmt.Fprintf(&many, "  - {name: db%d, postgresSecret: {name: walpost-db%[1]d}, ownerSecret: {name: owner-db%[1]d}, config: {nats: {stream: DB%[1]d, subject: 'db%[1]d.{event_type}'}}}\n", n)
	}
	if text, err = render(many.String()); err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, text+many.String())
	_ = z.Close()
	size := base64.StdEncoding.EncodedLen(base64.StdEncoding.EncodedLen(packed.Len()))
	t.Logf("a release of %d databases has %d bytes of manifests, and takes %d bytes in its Secret", most, len(text), size)
	if size > 1<<20 {
		t.Errorf("a release of %d databases takes %d bytes in its Secret, more than Kubernetes takes", most, size)
	}
}

func kubernetesObjects(t *testing.T, text string) map[string]any {
	t.Helper()
	objects := map[string]any{}
	d := yaml.NewDecoder(strings.NewReader(text))
	for {
		var o map[string]any
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		if o == nil {
			continue
		}
		name := fmt.Sprint(o["kind"], "/", o["metadata"].(map[string]any)["name"])
		if objects[name] != nil {
			t.Errorf("%s is there twice", name)
		}
		objects[name] = o
	}
}
