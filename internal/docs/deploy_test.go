package docs

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// deployed are the files under deploy, as paths from the root.
func deployed(t *testing.T) (files []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root, "deploy"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			path, err = filepath.Rel(root, path)
			files = append(files, filepath.ToSlash(path))
		}
		return err
	})
	if err != nil || len(files) < 20 {
		t.Fatalf("found %d files under deploy: %v", len(files), err)
	}
	return files
}

// node is a document, or a part of one, of YAML or JSON.
type node struct {
	t    *testing.T
	file string
	any
}

// at follows a path of keys and indices; what is not there is an error.
func (n node) at(path ...any) node {
	n.t.Helper()
	for _, p := range path {
		var next any
		switch p := p.(type) {
		case string:
			next = n.any.(map[string]any)[p]
		case int:
			next = n.any.([]any)[p]
		}
		if next == nil {
			n.t.Fatalf("%s has nothing at %v", n.file, path)
		}
		n.any = next
	}
	return n
}

func (n node) text() string {
	n.t.Helper()
	s, ok := n.any.(string)
	if !ok {
		n.t.Fatalf("%s has %v where a text should be", n.file, n.any)
	}
	return s
}

// document reads a file of one document; JSON is YAML, too.
func document(t *testing.T, file string) node {
	t.Helper()
	d := yaml.NewDecoder(strings.NewReader(read(t, file)))
	var content map[string]any
	if err := d.Decode(&content); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		t.Errorf("%s has more than one document: %v", file, err)
	}
	return node{t, file, content}
}

// TestDeployedFilesAreRead: templates of the chart are for Helm alone.
func TestDeployedFilesAreRead(t *testing.T) {
	for _, file := range deployed(t) {
		switch {
		case strings.Contains(file, "/templates/"):
		case strings.HasSuffix(file, ".json"):
			if !json.Valid([]byte(read(t, file))) {
				t.Errorf("%s is no JSON", file)
			}
		case strings.HasSuffix(file, ".yaml"):
			document(t, file)
		}
	}
}

// TestFetchedByDigest: actions, and the images of the Dockerfile and of Compose, cannot be exchanged under their tags.
func TestFetchedByDigest(t *testing.T) {
	workflows, err := filepath.Glob(filepath.Join(root, ".github/workflows/*"))
	if err != nil {
		t.Fatal(err)
	}
	files := append(workflows, filepath.Join(root, "deploy/Dockerfile"), filepath.Join(root, "deploy/compose.yaml"))
	fetches := regexp.MustCompile(`(?m)^(?:.*\buses:|FROM(?: --platform=\S+)?|    image:) (.*)$`)
	pinned := regexp.MustCompile(`@(sha256:[0-9a-f]{64}( AS \w+)?|[0-9a-f]{40} # v[0-9.]+)$`)
	all := 0
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range fetches.FindAllStringSubmatch(string(b), -1) {
			if all++; m[1] != "walpost" && !pinned.MatchString(m[1]) {
				t.Errorf("%s fetches %s, and by no digest", file, m[1])
			}
		}
	}
	if all < 15 {
		t.Errorf("found %d actions and images", all)
	}
}

func TestDeployedExampleIsTheProgramsOwn(t *testing.T) {
	if read(t, "deploy/walpost.example.yaml") != walpost(t, "config", "example") {
		t.Error("deploy/walpost.example.yaml is not what `walpost config example` prints")
	}
}

var variable = regexp.MustCompile(`\bWALPOST_[A-Z_]*[A-Z]\b`)

// TestDeployedVariablesExist, in whatever file they stand.
func TestDeployedVariablesExist(t *testing.T) {
	known := map[string]bool{}
	for _, s := range settings(walpost(t, "config", "example")) {
		known[s.env] = true
	}
	seen := 0
	for _, file := range deployed(t) {
		for _, name := range variable.FindAllString(read(t, file), -1) {
			seen++
			if !known[name] {
				t.Errorf("%s names %s, which walpost does not read", file, name)
			}
		}
	}
	if seen < 50 {
		t.Errorf("found only %d variables", seen)
	}
}

var serverURL = regexp.MustCompile("\\b(?:postgres|postgresql|nats|ws)://[^\\s\"'`)]*[^\\s\"'`).,;:]")

// TestExamplesVerifyTheServer: whoever copies a URL of another machine sends no password in clear. The composed
// services are on one machine, and their file says so.
func TestExamplesVerifyTheServer(t *testing.T) {
	seen := 0
	files := slices.Sorted(slices.Values(slices.Concat(deployed(t), documents)))
	for _, file := range slices.Compact(files) {
		if file == "deploy/compose.yaml" {
			continue
		}
		for _, text := range serverURL.FindAllString(read(t, file), -1) {
			u, err := url.Parse(text)
			if err != nil || u.Hostname() == "" || u.Hostname() == "localhost" || strings.HasPrefix(u.Hostname(), "127.") {
				continue
			}
			if seen++; !strings.HasPrefix(u.Scheme, "postgres") || u.Query().Get("sslmode") != "verify-full" {
				t.Errorf("%s has %s: want sslmode=verify-full, or tls:// for NATS", file, text)
			}
		}
	}
	if seen < 3 {
		t.Errorf("found only %d URLs of other machines", seen)
	}
}

// TestDeployedConfigurationsAreAccepted has the program check them: a key that it
// does not know is an error.
func TestDeployedConfigurationsAreAccepted(t *testing.T) {
	const url = "WALPOST_POSTGRES_URL=postgres://walpost:two@postgres/shop"
	checkConfig(t, "deploy/walpost.example.yaml", read(t, "deploy/walpost.example.yaml"))
	checkConfig(t, "deploy/kubernetes/config.yaml", document(t, "deploy/kubernetes/config.yaml").at("data", "walpost.yaml").text(), url)
	chart, err := yaml.Marshal(document(t, "deploy/helm/walpost/values.yaml").at("config").any)
	if err != nil {
		t.Fatal(err)
	}
	checkConfig(t, "deploy/helm/walpost/values.yaml", string(chart), url)
	compose := document(t, "deploy/compose.yaml")
	for _, service := range []string{"migrate", "walpost"} {
		var env []string
		for name, value := range compose.at("services", service, "environment").any.(map[string]any) {
			env = append(env, name+"="+interpolated(value.(string)))
		}
		checkConfig(t, "deploy/compose.yaml ("+service+")", "", env...)
	}
}

// interpolated has a value for each ${NAME:?what to do}.
func interpolated(s string) string {
	return regexp.MustCompile(`\$\{\w+:\?[^}]+\}`).ReplaceAllString(s, "value")
}

func checkConfig(t *testing.T, name, text string, env ...string) {
	t.Helper()
	bin, err := program()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "walpost.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "config", "check", "--config", file)
	cmd.Env = env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil || stderr.Len() > 0 {
		t.Errorf("%s: %v\n%s", name, err, &stderr)
	}
}

// TestManifestsFitTogether: what one names, another has.
func TestManifestsFitTogether(t *testing.T) {
	manifest := func(name string) node { return document(t, "deploy/kubernetes/"+name+".yaml") }
	deployment := manifest("deployment").at("spec")
	pod := deployment.at("template", "spec")
	job := manifest("migrate").at("spec", "template", "spec")
	cron := manifest("retention").at("spec", "jobTemplate", "spec", "template", "spec")
	name := deployment.at("template", "metadata", "labels", "app.kubernetes.io/name").text()
	for what, selected := range map[string]node{
		"deployment": deployment.at("selector", "matchLabels"), "pdb": manifest("pdb").at("spec", "selector", "matchLabels"),
		"service": manifest("service").at("spec", "selector"),
		"spread":  pod.at("topologySpreadConstraints", 0, "labelSelector", "matchLabels"),
	} {
		if got := selected.at("app.kubernetes.io/name").text(); got != name {
			t.Errorf("%s selects %q, the pods are %q", what, got, name)
		}
	}
	config := manifest("config").at("metadata", "name").text()
	for what, spec := range map[string]node{"deployment": pod, "migrate": job, "retention": cron} {
		if got := spec.at("volumes", 0, "configMap", "name").text(); got != config {
			t.Errorf("%s mounts the ConfigMap %q, there is %q", what, got, config)
		}
		container := spec.at("containers", 0)
		if got, want := container.at("image").text(), pod.at("containers", 0, "image").text(); got != want {
			t.Errorf("%s has image %q, the deployment %q", what, got, want)
		}
		words := container.at("args").any.([]any)
		if walpost(t, words[0].(string), "--help") == "" || container.at("env", 0, "name").text() != "WALPOST_POSTGRES_URL_FILE" {
			t.Errorf("%s runs %v", what, words)
		}
		for _, safe := range []any{
			spec.at("securityContext", "runAsNonRoot").any, container.at("securityContext", "readOnlyRootFilesystem").any,
		} {
			if safe != true {
				t.Errorf("%s may be root, or write", what)
			}
		}
	}
}

// TestAnEndHasTimeToDrain: whoever ends a relay waits for longer than it drains
// and lets the last scrape finish.
func TestAnEndHasTimeToDrain(t *testing.T) {
	least := seconds(t, "relay/session.go", `drainTimeout = (\d+) \* time\.Second`) +
		seconds(t, "relay/marker.go", `finishTimeout = (\d+) \* time\.Second`) +
		seconds(t, "cmd/walpost/http.go", `httpShutdown = (\d+) \* time\.Second`)
	for file, grace := range map[string]string{
		"deploy/compose.yaml":                           `image: walpost(?s:.*)stop_grace_period: (\d+)s`,
		"deploy/kubernetes/deployment.yaml":             `terminationGracePeriodSeconds: (\d+)`,
		"deploy/helm/walpost/templates/deployment.yaml": `terminationGracePeriodSeconds: (\d+)`,
		"deploy/systemd/walpost.service":                `(?m)^TimeoutStopSec=(\d+)$`,
	} {
		if got := seconds(t, file, grace); got < 3*least/2 {
			t.Errorf("%s grants %d s, and an end may take %d s", file, got, least)
		}
	}
}

func seconds(t *testing.T, file, pattern string) int {
	t.Helper()
	m := regexp.MustCompile(pattern).FindStringSubmatch(read(t, file))
	if m == nil {
		t.Fatalf("%s has no %s", file, pattern)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

var chartValue = regexp.MustCompile(`\.Values((?:\.\w+)+)`)

// TestChartUsesItsValues: a value that a template names is there, and each one
// that is there is used.
func TestChartUsesItsValues(t *testing.T) {
	values := document(t, "deploy/helm/walpost/values.yaml")
	unused := map[string]bool{}
	for name := range values.any.(map[string]any) {
		unused[name] = true
	}
	for _, file := range deployed(t) {
		if !strings.Contains(file, "/templates/") {
			continue
		}
		for _, m := range chartValue.FindAllStringSubmatch(read(t, file), -1) {
			at := values
			for i, key := range strings.Split(m[1][1:], ".") {
				content, _ := at.any.(map[string]any)
				if content[key] == nil {
					t.Errorf("%s uses .Values%s, which values.yaml lacks", file, m[1])
					break
				}
				if i == 0 {
					delete(unused, key)
				}
				at = node{t, values.file, content[key]}
			}
		}
	}
	for name := range unused {
		t.Errorf("no template uses .Values.%s", name)
	}
}

// TestChartHasTheRules: it can only read files of its own.
func TestChartHasTheRules(t *testing.T) {
	if read(t, "deploy/helm/walpost/rules.yaml") != read(t, "deploy/prometheus/walpost.rules.yaml") {
		t.Error("deploy/helm/walpost/rules.yaml is not deploy/prometheus/walpost.rules.yaml")
	}
}

var producerGrant = regexp.MustCompile(`(?s)GRANT INSERT \([^;]* TO shop;`)

// TestGrantsAreThoseOfTheScript: OPERATIONS has the producer's. A set-up by hand has the program grant what a relay needs;
// cmd/walpost compares that with the script.
func TestGrantsAreThoseOfTheScript(t *testing.T) {
	script := strings.ReplaceAll(read(t, "deploy/grants.sql"), ":outbox", "outbox_messages")
	want := producerGrant.FindString(strings.ReplaceAll(script, `:"producer"`, "shop"))
	got := producerGrant.FindString(section(t, "docs/OPERATIONS.md", "### Rows marked by hand"))
	if want == "" || !slices.Equal(strings.Fields(got), strings.Fields(want)) {
		t.Errorf("a producer is granted %q, by deploy/grants.sql %q", got, want)
	}
	if !strings.Contains(section(t, "docs/OPERATIONS.md", "### Setting up by hand"), "walpost migrate up --grant walpost ") {
		t.Error("a set-up by hand does not grant")
	}
}

// TestMakeBuild: `make build` makes walpost alone, and says of what; also where git does not trust the checkout, in which
// Go's own stamp fails.
func TestMakeBuild(t *testing.T) {
	out, err := exec.Command("make", "-n", "-C", root, "build", "VERSION=1.2.3", "REVISION=abc").CombinedOutput()
	if err != nil {
		t.Fatalf("make -n build: %v\n%s", err, out)
	}
	for _, want := range []string{"-buildvcs=false", "-X main.version=1.2.3 -X main.revision=abc", "./cmd/walpost\n"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("make build does not say %q:\n%s", want, out)
		}
	}
	for _, name := range []string{"main.version", "main.revision"} {
		if !strings.Contains(read(t, "deploy/Dockerfile"), "-X "+name+"=$") {
			t.Errorf("deploy/Dockerfile does not stamp %s", name)
		}
	}
	if source := read(t, "cmd/walpost/version.go"); !strings.Contains(source, "var version, revision string") {
		t.Error("cmd/walpost/version.go has no such variables")
	}
}
