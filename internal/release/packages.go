package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// packages makes a deb and an rpm of each Linux program with nfpm, from deploy/packages.
func (r *release) packages(ctx context.Context) error {
	for _, p := range r.platforms {
		if p.os != "linux" {
			continue
		}
		dir := filepath.Join(r.work, "package_"+p.arch)
		if err := r.stage(p, dir); err != nil {
			return err
		}
		for _, kind := range []string{"deb", "rpm"} {
			if _, err := r.tool(ctx, "nfpm", "package", "--config", filepath.Join(dir, "nfpm.yaml"),
				"--packager", kind, "--target", r.path(r.folder(p)+"."+kind)); err != nil {
				return err
			}
		}
	}
	return nil
}

// tool runs a program of .ci/tools, which has its own go.mod. Its paths have to be absolute. The list of
// components has the tool's own checksum, and so the tool is built without this machine's directories.
func (r *release) tool(ctx context.Context, name string, args ...string) ([]byte, error) {
	all := append([]string{"-C", ".ci/tools", "tool", name}, args...)
	return r.command(ctx, []string{"GOFLAGS=-trimpath -buildvcs=false"}, "go", all...)
}

// stage writes what the packages have into a directory, each file with the time of the commit.
func (r *release) stage(p platform, dir string) error {
	files, err := r.packaged(p, dir)
	if err != nil {
		return err
	}
	for name, data := range files {
		file := filepath.Join(dir, name)
		if err := writeFile(file, data); err != nil {
			return err
		}
		if err := os.Chtimes(file, r.at, r.at); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) packaged(p platform, dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	contents, err := r.contents(p)
	if err != nil {
		return nil, err
	}
	for _, e := range contents {
		if strings.HasPrefix(e.name, "man/") {
			e.name += ".gz"
			if e.data, err = compressed(e.data); err != nil {
				return nil, err
			}
		}
		files[e.name] = e.data
	}
	documents, err := r.documents()
	if err != nil {
		return nil, err
	}
	for _, e := range below("doc", documents) {
		files[e.name] = e.data
	}
	scripts, err := directory(filepath.Join(r.root, "deploy", "packages"))
	for _, e := range scripts {
		files[e.name] = e.data
	}
	if err != nil {
		return nil, err
	}
	fill := strings.NewReplacer("{{dir}}", dir, "{{arch}}", p.arch, "{{version}}", r.tag,
		"{{time}}", r.at.Format(time.RFC3339), "  # {{doc directories}}", docDirectories(documents))
	files["nfpm.yaml"] = []byte(fill.Replace(string(files["nfpm.yaml"])))
	for _, name := range []string{"walpost.service", "walpost@.service"} {
		if files[name], err = replaced(files[name], unitChanges); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// docDirectories are the lines of the documents' directories in nfpm.yaml.
func docDirectories(documents []entry) string {
	lines := map[string]bool{}
	for _, e := range documents {
		dir := path.Join("/usr/share/doc/walpost", path.Dir(e.name))
		for ; dir != "/usr/share/doc"; dir = path.Dir(dir) {
			lines["  - {dst: "+dir+", type: dir, file_info: {mode: 0755}}"] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(lines)), "\n")
}

// units are deploy/systemd/walpost.service and the template that is made of it: walpost@NAME is a further
// relay of the machine, with /etc/walpost/NAME.yaml.
func (r *release) units() ([]entry, error) {
	unit, err := os.ReadFile(filepath.Join(r.root, "deploy", "systemd", "walpost.service"))
	if err != nil {
		return nil, err
	}
	template, err := replaced(unit, templateChanges)
	return []entry{{"walpost.service", 0o644, unit}, {"walpost@.service", 0o644, template}}, err
}

// templateChanges make the template of the unit.
var templateChanges = [][2]string{
	{"NATS JetStream\n", "NATS JetStream (%i)\n"},
	{"=/etc/walpost/walpost.yaml\n", "=/etc/walpost/%i.yaml\n"},
	{" /etc/walpost/walpost.yaml\n", " /etc/walpost/%i.yaml\n"},
}

// unitChanges make the units of an administrator, who copies them, those of the packages.
var unitChanges = [][2]string{
	{"# The program is /usr/local/bin/walpost. A second", "# A second"},
	{"ExecStart=/usr/local/bin/", "ExecStart=/usr/bin/"},
	{"\nLoadCredential=pgpass", "\n#LoadCredential=pgpass"},
	{"\nEnvironment=PGPASSFILE", "\n#Environment=PGPASSFILE"},
	{"DynamicUser=yes", "User=walpost\nGroup=walpost"},
}

// replaced makes each change once. A text that is not there is an error.
func replaced(text []byte, changes [][2]string) ([]byte, error) {
	s := string(text)
	for _, c := range changes {
		if strings.Count(s, c[0]) != 1 {
			return nil, fmt.Errorf("find %q once: it is there %d times", c[0], strings.Count(s, c[0]))
		}
		s = strings.Replace(s, c[0], c[1], 1)
	}
	return []byte(s), nil
}

// components lists the modules of each program, as CycloneDX.
func (r *release) components(ctx context.Context) error {
	for _, p := range r.platforms {
		if _, err := r.tool(ctx, "cyclonedx-gomod", "bin", "-json", "-std", "-noserial", "-notimestamp",
			"-version", r.tag, "-output", r.path(r.folder(p)+".cdx.json"), r.programFile(p)); err != nil {
			return err
		}
	}
	return nil
}
