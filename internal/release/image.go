package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"time"
)

// The parts of the OCI image format that walpost's image has.
type (
	descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int               `json:"size"`
		Platform    map[string]string `json:"platform,omitempty"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	manifest struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Config        *descriptor  `json:"config,omitempty"`
		Layers        []descriptor `json:"layers,omitempty"`
		Manifests     []descriptor `json:"manifests,omitempty"`
		// Annotations say where the image comes from.
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	imageConfig struct {
		Created      time.Time      `json:"created"`
		Architecture string         `json:"architecture"`
		OS           string         `json:"os"`
		Config       map[string]any `json:"config"`
		RootFS       rootFS         `json:"rootfs"`
		History      []history      `json:"history"`
	}
	rootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}
	history struct {
		Created   time.Time `json:"created"`
		CreatedBy string    `json:"created_by"`
	}
)

const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// layout is an OCI image layout: what a registry has, as files.
type layout struct {
	entries []entry
	known   map[string]bool
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (l *layout) add(mediaType string, data []byte) descriptor {
	d := descriptor{MediaType: mediaType, Digest: digest(data), Size: len(data)}
	if !l.known[d.Digest] {
		l.known[d.Digest] = true
		name := "blobs/sha256/" + strings.TrimPrefix(d.Digest, "sha256:")
		l.entries = append(l.entries, entry{name, 0o644, data})
	}
	return d
}

func (l *layout) addJSON(mediaType string, value any) (descriptor, error) {
	data, err := json.Marshal(value)
	return l.add(mediaType, data), err
}

// image makes one archive with the image of every Linux program: certificate authorities, user, program.
func (r *release) image(ctx context.Context) error {
	env := []string{"GOFLAGS=-buildvcs=false"}
	authorities, err := r.command(ctx, env, "go", "-C", ".ci/tools", "run", "./cacerts")
	if err != nil {
		return err
	}
	const user = "nonroot:x:65532:65532:nonroot:/:/sbin/nologin\n"
	base := []entry{
		{"etc/", 0o755, nil},
		{"etc/ssl/", 0o755, nil},
		{"etc/ssl/certs/", 0o755, nil},
		{"etc/ssl/certs/ca-certificates.crt", 0o644, authorities},
		{"etc/passwd", 0o644, []byte(user)},
		{"etc/group", 0o644, []byte("nonroot:x:65532:\n")},
	}
	l := &layout{known: map[string]bool{}}
	index := manifest{SchemaVersion: 2, MediaType: mediaIndex, Annotations: r.annotations()}
	for _, p := range r.platforms {
		if p.os != "linux" {
			continue
		}
		d, err := r.platformImage(l, p, base)
		if err != nil {
			return err
		}
		index.Manifests = append(index.Manifests, d)
	}
	if len(index.Manifests) == 0 {
		return nil
	}
	return r.writeImage(l, index)
}

func (r *release) annotations() map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":    "walpost",
		"org.opencontainers.image.source":   repository,
		"org.opencontainers.image.version":  r.version,
		"org.opencontainers.image.revision": r.commit,
		"org.opencontainers.image.created":  r.at.Format(time.RFC3339),
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
}

// platformImage adds the image of one platform: as deploy/Dockerfile makes it.
func (r *release) platformImage(l *layout, p platform, base []entry) (descriptor, error) {
	program, err := os.ReadFile(r.programFile(p))
	if err != nil {
		return descriptor{}, err
	}
	config := imageConfig{
		Created: r.at, Architecture: p.arch, OS: p.os, RootFS: rootFS{Type: "layers"},
		Config: map[string]any{
			"User": "65532:65532", "Entrypoint": []string{"/walpost"}, "Cmd": []string{"run"},
			"ExposedPorts": map[string]any{"9464/tcp": map[string]any{}},
			"WorkingDir":   "/", "Labels": r.annotations(),
		},
	}
	m := manifest{SchemaVersion: 2, MediaType: mediaManifest, Annotations: r.annotations()}
	for _, entries := range [][]entry{base, {{"walpost", 0o755, program}}} {
		data, err := tarball(entries, r.at)
		if err != nil {
			return descriptor{}, err
		}
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest(data))
		config.History = append(config.History, history{r.at, "make release"})
		if data, err = compressed(data); err != nil {
			return descriptor{}, err
		}
		m.Layers = append(m.Layers, l.add(mediaLayer, data))
	}
	c, err := l.addJSON(mediaConfig, config)
	if err != nil {
		return descriptor{}, err
	}
	m.Config = &c
	d, err := l.addJSON(mediaManifest, m)
	d.Platform = map[string]string{"os": p.os, "architecture": p.arch}
	return d, err
}

// writeImage writes the layout as an archive that skopeo, crane, docker load and ctr read.
func (r *release) writeImage(l *layout, index manifest) error {
	d, err := l.addJSON(mediaIndex, index)
	if err != nil {
		return err
	}
	r.imageDigest = d.Digest
	d.Annotations = map[string]string{"org.opencontainers.image.ref.name": r.version}
	top, err := json.Marshal(manifest{SchemaVersion: 2, MediaType: mediaIndex, Manifests: []descriptor{d}})
	if err != nil {
		return err
	}
	data, err := tarball(append(l.entries,
		entry{"oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		entry{"index.json", 0o644, top}), r.at)
	if err != nil {
		return err
	}
	return writeFile(r.path("walpost_"+r.version+"_image.tar"), data)
}
