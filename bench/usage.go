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

// listener is the process on this machine that listens on an address; 0 where none is found, or where this
// user may not see it.
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
	inodes := listeningInodes(n)
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	least := 0
	for _, link := range links {
		to, err := os.Readlink(link)
		inode := strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")
		if err != nil || !slices.Contains(inodes, inode) {
			continue
		}
		if pid, err := strconv.Atoi(strings.Split(link, "/")[2]); err == nil && (least == 0 || pid < least) {
			least = pid // the postmaster, and not a child that has inherited the socket
		}
	}
	return least
}

// listeningInodes are the inodes of the sockets that listen on a port.
func listeningInodes(port int) (inodes []string) {
	const listen = "0A"
	local := fmt.Sprintf(":%04X", port)
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			if len(fields) > 9 && fields[3] == listen && strings.HasSuffix(fields[1], local) {
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

// tick is the unit of /proc/<pid>/stat, on every platform that Go supports.
const tick = 10 * time.Millisecond

// ownCPU is the CPU time of this process so far.
func ownCPU() time.Duration { return cpuOf(os.Getpid()) }

// cpuOf is the CPU time of a process and of its children, whether they live or have ended.
func cpuOf(pid int) (total time.Duration) {
	if pid == 0 {
		return 0
	}
	// A child that ends between two reads would be counted neither as living nor as ended: read again.
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

// stat is an extract of /proc/<pid>/stat.
type stat struct {
	parent     int
	own, ended time.Duration // CPU time: the process's, and that of its children that have ended
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
