package bench

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// listener is the process on this machine that listens where an address says, 0
// where there is none or where it may not be seen.
func listener(addr string) int {
	host, port, err := net.SplitHostPort(addr)
	ip := net.ParseIP(host)
	if err != nil || ip == nil || !ip.IsLoopback() {
		return 0
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return 0
	}
	inodes := listening(n)
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	least := 0
	for _, link := range links {
		to, err := os.Readlink(link)
		if err != nil || !slices.Contains(inodes, strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")) {
			continue
		}
		if pid, err := strconv.Atoi(strings.Split(link, "/")[2]); err == nil && (least == 0 || pid < least) {
			least = pid // the postmaster, and not a child that has inherited the socket
		}
	}
	return least
}

// listening are the inodes of the sockets that listen on a port.
func listening(port int) (inodes []string) {
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			const listen = "0A"
			if len(fields) > 9 && fields[3] == listen && strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", port)) {
				inodes = append(inodes, fields[9])
			}
		}
		f.Close()
	}
	return inodes
}

// usage is the CPU time that the servers have taken so far.
type usage struct{ postgres, broker time.Duration }

func (b *bench) usage() usage { return usage{cpuOf(b.postgres), cpuOf(b.broker)} }

func (b *bench) since(u usage) (postgres, broker time.Duration) {
	now := b.usage()
	return now.postgres - u.postgres, now.broker - u.broker
}

// tick is the kernel's unit, on every platform that Go knows.
const tick = 10 * time.Millisecond

// cpuOf is the CPU time of a process, of its children that have ended, and of those
// that live.
func cpuOf(pid int) (total time.Duration) {
	if pid == 0 {
		return 0
	}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		// The program's name, in parentheses, may hold anything.
		_, rest, found := strings.Cut(string(text[max(0, strings.LastIndexByte(string(text), ')')):]), ") ")
		fields := strings.Fields(rest)
		if !found || len(fields) < 15 {
			continue
		}
		ppid := fields[1]
		own := filepath.Base(filepath.Dir(name)) == strconv.Itoa(pid)
		if !own && ppid != strconv.Itoa(pid) {
			continue
		}
		for i, field := range fields[11:15] { // utime, stime, cutime, cstime
			if n, err := strconv.ParseInt(field, 10, 64); err == nil && (own || i < 2) {
				total += time.Duration(n) * tick
			}
		}
	}
	return total
}
