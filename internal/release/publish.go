package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
)

const repository = "https://github.com/walpost/walpost"

// chart is deploy/helm/walpost with the release's version and image.
func (r *release) chart(context.Context) error {
	files, err := directory(filepath.Join(r.root, "deploy", "helm", "walpost"))
	if err != nil {
		return err
	}
	for i, e := range files {
		switch e.name {
		case "Chart.yaml":
			files[i].data = chartVersion.ReplaceAll(e.data,
				fmt.Appendf(nil, "version: %s\nappVersion: %q\n", r.version, r.version))
		case "values.yaml":
			files[i].data, err = replaced(e.data, [][2]string{
				{
					"repository: registry.example.com/walpost # yours, made with deploy/Dockerfile",
					"repository: ghcr.io/walpost/walpost",
				},
				{"  tag: dev\n", "  tag: " + r.version + "\n"},
				{`digest: ""`, fmt.Sprintf("digest: %q", r.imageDigest)},
			})
		}
		if err != nil {
			return err
		}
	}
	data, err := tarGz(below("walpost", files), r.at)
	if err != nil {
		return err
	}
	return writeFile(r.path("walpost_"+r.version+"_chart.tgz"), data)
}

var chartVersion = regexp.MustCompile(`(?m)^version: .*\n`)

// formula is for Homebrew. It names the archives of macOS and Linux, and is written where all are there.
func (r *release) formula(context.Context) error {
	text, err := os.ReadFile(filepath.Join(r.root, "deploy", "homebrew", "walpost.rb"))
	if err != nil {
		return err
	}
	words := []string{"{{version}}", r.version, "{{tag}}", r.tag}
	for _, p := range []platform{
		{"darwin", "amd64"}, {"darwin", "arm64"}, {"linux", "amd64"}, {"linux", "arm64"},
	} {
		data, err := os.ReadFile(r.path(r.folder(p) + ".tar.gz"))
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		words = append(words, "{{"+p.String()+"}}", hex.EncodeToString(sum[:]))
	}
	return writeFile(r.path("walpost.rb"), []byte(strings.NewReplacer(words...).Replace(string(text))))
}

// sums are the files of the release with their SHA-256, sorted.
func (r *release) sums() (names, sums []string, err error) {
	files, err := directory(r.out)
	for _, e := range files { // sorted by WalkDir
		sum := sha256.Sum256(e.data)
		names, sums = append(names, e.name), append(sums, hex.EncodeToString(sum[:]))
	}
	return names, sums, err
}

// provenance says from what, and with what, the files were made: an in-toto statement with SLSA's predicate.
// The release workflow attests the same with its identity.
func (r *release) provenance(context.Context) error {
	names, sums, err := r.sums()
	if err != nil {
		return err
	}
	var subjects []any
	subject := func(name, sum string) {
		subjects = append(subjects, map[string]any{"name": name, "digest": map[string]string{"sha256": sum}})
	}
	for i := range names {
		subject(names[i], sums[i])
	}
	if r.imageDigest != "" {
		subject("ghcr.io/walpost/walpost", strings.TrimPrefix(r.imageDigest, "sha256:"))
	}
	source := map[string]any{"uri": "git+" + repository, "digest": map[string]string{"gitCommit": r.commit}}
	statement, err := json.MarshalIndent(map[string]any{
		"_type": "https://in-toto.io/Statement/v1", "subject": subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": map[string]any{
			"buildDefinition": map[string]any{
				"buildType":            repository + "/blob/main/docs/RELEASING.md",
				"externalParameters":   map[string]any{"version": r.tag, "revision": r.revision},
				"internalParameters":   map[string]any{"go": runtime.Version()},
				"resolvedDependencies": []any{source},
			},
			"runDetails": map[string]any{"builder": map[string]any{"id": repository + "/blob/main/Makefile"}},
		},
	}, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(r.path("walpost_"+r.version+"_provenance.intoto.json"), append(statement, '\n'))
}

const checksumsFile = "checksums.txt"

// checksums is what `sha256sum --check` reads.
func (r *release) checksums(context.Context) error {
	names, sums, err := r.sums()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	for i := range names {
		fmt.Fprintf(&b, "%s  %s\n", sums[i], names[i])
	}
	return writeFile(r.path(checksumsFile), b.Bytes())
}

// sign signs the checksums with an SSH key. The release workflow signs with its identity instead.
func (r *release) sign(ctx context.Context, key string) error {
	if key == "" {
		fmt.Fprintf(os.Stderr, "release: %s is not signed: -sign-key names an SSH key\n", checksumsFile)
		return nil
	}
	args := []string{"-q", "-Y", "sign", "-n", "walpost", "-f", key, r.path(checksumsFile)}
	_, err := r.command(ctx, nil, "ssh-keygen", args...)
	return err
}
