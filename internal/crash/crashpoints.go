//go:build crashpoints

package crash

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

var hits atomic.Int64

// At ends the process as SIGKILL does, the n-th time that it comes to the place
// which WALPOST_CRASH names as "place:n".
func At(place string) {
	at, n, _ := strings.Cut(os.Getenv("WALPOST_CRASH"), ":")
	if at != place {
		return
	}
	if want, _ := strconv.ParseInt(n, 10, 64); hits.Add(1) >= want {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // it takes a moment
	}
}
