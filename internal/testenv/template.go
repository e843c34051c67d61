package testenv

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// template is a data directory as initdb left it. initdb takes a second or
// two, a copy some hundredths.
type template struct {
	once sync.Once
	dir  string
	err  error
}

// newDataDir makes dir a data directory of its own system identifier.
func (w *workspace) newDataDir(ctx context.Context, bin pgbin.Binaries, dir string, who *account) error {
	w.mu.Lock()
	t := w.clusters[bin.Dir]
	if t == nil {
		t = new(template)
		w.clusters[bin.Dir] = t
	}
	w.mu.Unlock()

	t.once.Do(func() { t.dir, t.err = w.dataDir(context.WithoutCancel(ctx), bin, who) })
	if t.err != nil {
		return t.err
	}
	if err := copyTree(dir, t.dir, who, nil); err != nil {
		return fmt.Errorf("copy template cluster: %w", err)
	}
	if err := newIdentity(dir); err != nil {
		return fmt.Errorf("give cluster its own system identifier: %w", err)
	}
	return nil
}

// dataDir returns the directory that an earlier process kept, or lets initdb make one and keeps it.
func (w *workspace) dataDir(ctx context.Context, bin pgbin.Binaries, who *account) (string, error) {
	kept, kerr := keptPath("initdb", bin.Dir, bin.Version, fmt.Sprint(initdbArgs))
	if kerr == nil {
		if _, err := os.Stat(kept); err == nil {
			return kept, nil
		}
	}
	dir, err := w.initdb(ctx, bin.Dir, who)
	if err == nil && kerr == nil {
		_ = keepTree(kept, dir) // the next process makes its own
	}
	return dir, err
}

var initdbArgs = []string{
	"--username", superuser, "--auth", "trust", "--encoding", "UTF8", "--locale", "C",
	"--no-sync", "--no-instructions",
}

func (w *workspace) initdb(ctx context.Context, bin string, who *account) (string, error) {
	parent, err := w.mkdir("template")
	if err != nil {
		return "", err
	}
	if err := who.own(parent); err != nil {
		return "", err
	}
	dir := filepath.Join(parent, "data")
	args := append([]string{"--pgdata", dir}, initdbArgs...)
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), args...)
	cmd.Dir, cmd.Env = parent, serverEnv(parent)
	who.apply(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("run initdb: %w\n%s", err, out)
	}
	return dir, nil
}

// newIdentity writes a new system identifier into a copied, stopped cluster.
// It names the database in positions and message ids: two clusters of one
// test must not share it. It stands in pg_control, under a checksum, and in
// the long page header that opens each WAL segment.
func newIdentity(dir string) error {
	id := rand.Uint64() >> 1
	if err := patchControl(filepath.Join(dir, "global", "pg_control"), id); err != nil {
		return err
	}
	segments, err := filepath.Glob(filepath.Join(dir, "pg_wal", "0000*"))
	if err != nil {
		return err
	}
	if len(segments) == 0 {
		return errors.New("find WAL segments: none")
	}
	for _, segment := range segments {
		if err := patchSegment(segment, id); err != nil {
			return err
		}
	}
	return nil
}

// patchControl finds the checksum by its value, because its place differs from
// version to version.
func patchControl(path string, id uint64) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	for at := 8; at+4 <= len(b); at += 4 {
		if binary.NativeEndian.Uint32(b[at:]) != crc32.Checksum(b[:at], castagnoli) {
			continue
		}
		binary.NativeEndian.PutUint64(b, id)
		binary.NativeEndian.PutUint32(b[at:], crc32.Checksum(b[:at], castagnoli))
		return os.WriteFile(path, b, 0o600)
	}
	return errors.New("find checksum in pg_control: none matches")
}

// patchSegment relies on XLogLongPageHeaderData: 20 bytes of short header,
// padded to 24, then the identifier.
func patchSegment(path string, id uint64) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, id), 24)
	return err
}
