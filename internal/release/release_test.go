package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func testRelease(t *testing.T, platforms ...platform) *release {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	r := &release{
		root: root, out: t.TempDir(), work: t.TempDir(), tag: "v1.2.3", version: "1.2.3", revision: "0123456789ab",
		commit: strings.Repeat("0123456789", 4), at: time.Unix(1_790_000_000, 0).UTC(), platforms: platforms,
	}
	for _, p := range platforms {
		if err := writeFile(r.programFile(p), []byte("the program for "+p.String())); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"man/walpost.1", "completions/_walpost", "docs/index.html"} {
		if err := writeFile(filepath.Join(r.work, name), []byte(name)); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// untar reads an archive, and finds the owner root and the time of the commit in every header.
func untar(t *testing.T, data []byte, at time.Time) map[string]string {
	t.Helper()
	files := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || !h.ModTime.Equal(at) {
			t.Errorf("%s is of %d:%d %q at %s", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(content)
	}
}

func gunzip(t *testing.T, data []byte) []byte {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if !z.ModTime.IsZero() || z.Name != "" {
		t.Errorf("the header has %s %q", z.ModTime, z.Name)
	}
	content, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func TestArchivesDependOnTheirFilesOnly(t *testing.T) {
	entries := []entry{{"b", 0o755, []byte("two")}, {"a/", 0o755, nil}, {"a/x", 0o644, []byte("one")}}
	other := slices.Clone(entries)
	slices.Reverse(other)
	at := time.Unix(1_790_000_000, 0)
	for name, pack := range map[string]func([]entry, time.Time) ([]byte, error){"tar": tarGz, "zip": zipped} {
		a, errA := pack(entries, at)
		b, errB := pack(other, at.UTC())
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v, %v", name, errA, errB)
		}
	}
}

func TestArchivesHaveWhatBelongsToTheProgram(t *testing.T) {
	r := testRelease(t, platform{"linux", "amd64"}, platform{"windows", "arm64"})
	if err := r.archives(t.Context()); err != nil {
		t.Fatal(err)
	}
	files := untar(t, gunzip(t, read(t, r.path("walpost_1.2.3_linux_amd64.tar.gz"))), r.at)
	for _, name := range []string{
		"walpost", "LICENSE", "README.md", "CHANGELOG.md", "walpost.example.yaml", "grants.sql", "walpost.service", "walpost@.service",
		"man/walpost.1", "completions/_walpost",
	} {
		if files["walpost_1.2.3_linux_amd64/"+name] == "" {
			t.Errorf("the archive lacks %s", name)
		}
	}
	z, err := zip.OpenReader(r.path("walpost_1.2.3_windows_arm64.zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if _, err := z.Open("walpost_1.2.3_windows_arm64/walpost.exe"); err != nil {
		t.Error(err)
	}
	if pages := untar(t, gunzip(t, read(t, r.path("walpost_1.2.3_docs.tar.gz"))), r.at); pages["walpost_1.2.3_docs/index.html"] == "" {
		t.Errorf("the documents are %v", pages)
	}
}

func TestPackagesHaveTheirOwnUnit(t *testing.T) {
	r := testRelease(t, platform{"linux", "arm64"})
	dir := t.TempDir()
	if err := r.stage(r.platforms[0], dir); err != nil {
		t.Fatal(err)
	}
	unit := string(read(t, filepath.Join(dir, "walpost.service")))
	for _, want := range []string{
		"\nAssertPathExists=/etc/walpost/walpost.yaml\n", "\nExecStart=/usr/bin/walpost run --config /etc/walpost/walpost.yaml\n", "\nUser=walpost\nGroup=walpost\n",
		"\n#LoadCredential=pgpass:", "\n#Environment=PGPASSFILE=",
	} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit lacks %q:\n%s", want, unit)
		}
	}
	if strings.Contains(unit, "DynamicUser") || strings.Contains(unit, "/usr/local") {
		t.Errorf("the unit is that of an administrator:\n%s", unit)
	}
	template := string(read(t, filepath.Join(dir, "walpost@.service")))
	same := strings.NewReplacer("/etc/walpost/%i.yaml", "/etc/walpost/walpost.yaml", " (%i)", "").Replace(template)
	if same != unit || strings.Count(template, "/etc/walpost/%i.yaml\n") != 2 || strings.Contains(template, "/walpost.yaml") {
		t.Errorf("the template is\n%s", template)
	}
	config := string(read(t, filepath.Join(dir, "nfpm.yaml")))
	if strings.Contains(config, "{{") || !strings.Contains(config, "\narch: \"arm64\"\nversion: \"v1.2.3\"\n") {
		t.Errorf("nfpm.yaml is\n%s", config)
	}
	info, err := os.Stat(filepath.Join(dir, "walpost"))
	if err != nil || !info.ModTime().Equal(r.at) {
		t.Errorf("the program is of %v: %v", info.ModTime(), err)
	}
}

func TestAChangeThatFindsNothingIsAnError(t *testing.T) {
	for _, text := range []string{"a", "b b"} {
		if _, err := replaced([]byte(text), [][2]string{{"b", "c"}}); err == nil {
			t.Errorf("%q was changed", text)
		}
	}
}

func TestImage(t *testing.T) {
	r := testRelease(t, platform{"linux", "amd64"}, platform{"linux", "arm64"})
	l := &layout{known: map[string]bool{}}
	index := manifest{SchemaVersion: 2, MediaType: mediaIndex}
	for _, p := range r.platforms {
		d, err := r.platformImage(l, p, []entry{{"etc/", 0o755, nil}, {"etc/passwd", 0o644, []byte("nonroot")}})
		if err != nil {
			t.Fatal(err)
		}
		index.Manifests = append(index.Manifests, d)
	}
	if err := r.writeImage(l, index); err != nil {
		t.Fatal(err)
	}
	files := untar(t, read(t, r.path("walpost_1.2.3_image.tar")), r.at)
	for name, content := range files {
		if sum, isBlob := strings.CutPrefix(name, "blobs/sha256/"); isBlob && digest([]byte(content)) != "sha256:"+sum {
			t.Errorf("%s is %s", name, digest([]byte(content)))
		}
	}
	blob := func(d string, into any) []byte {
		content := []byte(files["blobs/sha256/"+strings.TrimPrefix(d, "sha256:")])
		if into != nil {
			if err := json.Unmarshal(content, into); err != nil {
				t.Fatalf("%s: %v", d, err)
			}
		}
		return content
	}
	var top, all manifest
	if err := json.Unmarshal([]byte(files["index.json"]), &top); err != nil || top.Manifests[0].Digest != r.imageDigest {
		t.Fatalf("index.json is %s: %v", files["index.json"], err)
	}
	blob(r.imageDigest, &all)
	for i, p := range r.platforms {
		var one manifest
		var config imageConfig
		blob(all.Manifests[i].Digest, &one)
		blob(one.Config.Digest, &config)
		if config.Architecture != p.arch || config.Config["User"] != "65532:65532" || all.Manifests[i].Platform["architecture"] != p.arch {
			t.Errorf("%s: the configuration is %+v", p, config)
		}
		layer := gunzip(t, blob(one.Layers[1].Digest, nil))
		if digest(layer) != config.RootFS.DiffIDs[1] || untar(t, layer, r.at)["walpost"] != "the program for "+p.String() {
			t.Errorf("%s: the layer does not have the program", p)
		}
	}
}

func TestChartAndFormulaNameTheRelease(t *testing.T) {
	r := testRelease(t, platform{"darwin", "amd64"}, platform{"darwin", "arm64"}, platform{"linux", "amd64"}, platform{"linux", "arm64"})
	r.imageDigest = "sha256:abc"
	if err := errors.Join(r.archives(t.Context()), r.chart(t.Context()), r.formula(t.Context())); err != nil {
		t.Fatal(err)
	}
	chart := untar(t, gunzip(t, read(t, r.path("walpost_1.2.3_chart.tgz"))), r.at)
	for file, want := range map[string]string{
		"walpost/Chart.yaml":  "\nversion: 1.2.3\nappVersion: \"1.2.3\"\n",
		"walpost/values.yaml": "image:\n  repository: ghcr.io/walpost/walpost\n  tag: 1.2.3\n  digest: \"sha256:abc\" #",
	} {
		if !strings.Contains(chart[file], want) {
			t.Errorf("%s lacks %q:\n%s", file, want, chart[file])
		}
	}
	formula := string(read(t, r.path("walpost.rb")))
	if strings.Contains(formula, "{{") || !strings.Contains(formula, "/releases/download/v1.2.3/walpost_1.2.3_darwin_arm64.tar.gz\"\n") {
		t.Errorf("the formula is\n%s", formula)
	}
}

func TestChecksumsAndProvenanceHaveEveryFile(t *testing.T) {
	r := testRelease(t)
	if err := writeFile(r.path("a.tar.gz"), []byte("a")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.provenance(t.Context()), r.checksums(t.Context())); err != nil {
		t.Fatal(err)
	}
	const sum = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
	sums := string(read(t, r.path(checksumsFile)))
	if !strings.HasPrefix(sums, sum+"  a.tar.gz\n") || !strings.Contains(sums, "  walpost_1.2.3_provenance.intoto.json\n") {
		t.Errorf("the checksums are\n%s", sums)
	}
	if p := string(read(t, r.path("walpost_1.2.3_provenance.intoto.json"))); !strings.Contains(p, sum) || !strings.Contains(p, r.commit) {
		t.Errorf("the provenance is\n%s", p)
	}
}

func TestCompareFindsWhatDiffers(t *testing.T) {
	var said strings.Builder
	if err := compare(said.WriteString, map[string]string{"a": "1", "b": "2"}, map[string]string{"a": "1", "b": "2"}); err != nil {
		t.Error(err)
	}
	if said.String() != "two builds of one commit: the same bytes in all 2 files\n" {
		t.Errorf("said %q", &said)
	}
	for _, other := range []map[string]string{{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}} {
		if err := compare(said.WriteString, map[string]string{"a": "1", "b": "2"}, other); err == nil {
			t.Errorf("%v is the same", other)
		}
	}
}
