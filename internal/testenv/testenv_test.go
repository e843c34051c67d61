package testenv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

func TestMain(m *testing.M) {
	if os.Getenv("TESTENV_ABANDON") != "" {
		abandon()
	}
	Main(m)
}

// abandon is the program of TestJanitor: it starts servers, says what they
// are, and waits to be killed.
func abandon() {
	pg, err := StartPostgres(context.Background(), PGOptions{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	n, err := StartNATS(context.Background(), NATSOptions{Process: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%s\n%d\n%d\n", space.dir, pg.Pid(), n.process().cmd.Process.Pid)
	select {}
}

func TestJanitorCleansUpAfterKill(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TESTENV_ABANDON=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	lines := bufio.NewScanner(out)
	var said []string
	for len(said) < 3 && lines.Scan() {
		said = append(said, lines.Text())
	}
	check(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if len(said) < 3 {
		t.Fatalf("child said %q", said)
	}
	for _, pid := range said[1:] {
		waitFor(t, "process "+pid+" to end", func() bool { return !alive(t, pid) })
	}
	waitFor(t, said[0]+" to be removed", func() bool {
		_, err := os.Stat(said[0])
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestFindBinariesNamesTheVariable(t *testing.T) {
	t.Setenv(pgbin.EnvBin, t.TempDir())
	_, err := pgbin.Find()
	if err == nil || !strings.Contains(err.Error(), pgbin.EnvBin) || !strings.Contains(hint.Of(err), "apt-get install postgresql") {
		t.Fatalf("got %v, hint %q", err, hint.Of(err))
	}
}

func TestBinariesOfPrivateDirectoryAreCopied(t *testing.T) {
	extra, err := pgbin.Extra()
	check(t, err)
	if os.Geteuid() != 0 || len(extra) == 0 {
		t.Skip("needs root and a relocatable build in " + pgbin.EnvExtra)
	}
	private := filepath.Join(t.TempDir(), "private")
	check(t, os.Mkdir(private, 0o700))
	home := filepath.Join(private, "postgres")
	check(t, copyTree(home, filepath.Dir(extra[0].Dir), nil, nil))
	pg := NewPostgres(t, PGOptions{BinDir: filepath.Join(home, "bin")})
	if strings.HasPrefix(pg.Binaries().Dir, private) {
		t.Fatalf("runs from %s", pg.Binaries().Dir)
	}
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("wait for %s: timed out", what)
		}
	}
}

// alive does not count a zombie: an orphan's exit status is for process 1,
// which in some containers never asks.
func alive(t *testing.T, pid string) bool {
	t.Helper()
	n, err := strconv.Atoi(pid)
	check(t, err)
	if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && strings.Contains(string(stat), ") Z ") {
		return false
	}
	return syscall.Kill(n, 0) == nil
}
