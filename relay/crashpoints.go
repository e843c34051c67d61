//go:build crashpoints

package relay

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

var crashHits atomic.Int64

// crash ends the process as SIGKILL does, the n-th time that it comes to the place
// which WALPOST_CRASH names as "place:n".
func crash(place string) {
	at, n, _ := strings.Cut(os.Getenv("WALPOST_CRASH"), ":")
	if at != place {
		return
	}
	if want, _ := strconv.ParseInt(n, 10, 64); crashHits.Add(1) >= want {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // it takes a moment
	}
}
