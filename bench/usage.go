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

// ownCPU is what this process has taken so far.
func ownCPU() time.Duration { return cpuOf(os.Getpid()) }

// cpuOf is the CPU time of a process, of its children that have ended, and of those
// that live.
func cpuOf(pid int) (total time.Duration) {
	if pid == 0 {
		return 0
	}
	// What ends in between would be counted neither among those that live nor among those
	// that have ended.
	for range 100 {
		before, _ := readStat(pid)
		total = before.own + before.ended
		complete := true
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, name := range stats {
			child, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			if err != nil || child == pid {
				continue
			}
			s, ok := readStat(child)
			complete = complete && ok
			if s.parent == pid {
				total += s.own
			}
		}
		if after, _ := readStat(pid); complete && after.ended == before.ended {
			break
		}
	}
	return total
}

// stat is what the kernel says of a process.
type stat struct {
	parent     int
	own, ended time.Duration // CPU time, its own and that of its children that have ended
}

func readStat(pid int) (s stat, ok bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, false
	}
	// The program's name, in parentheses, may hold anything.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 15 {
		return s, false
	}
	s.parent, _ = strconv.Atoi(fields[1])
	times := [4]time.Duration{} // utime, stime, cutime, cstime
	for i := range times {
		n, _ := strconv.ParseInt(fields[11+i], 10, 64)
		times[i] = time.Duration(n) * tick
	}
	s.own, s.ended = times[0]+times[1], times[2]+times[3]
	return s, true
}
