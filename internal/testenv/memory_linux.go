package testenv

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
)

const (
	memoryDir = "/dev/shm"
	tmpfs     = 0x01021994
	// memoryNeeded has to be free: the largest tests write some GiB.
	memoryNeeded = 12 << 30
)

// memoryRoot is a directory in memory, or empty where it has too little room or $TMPDIR names a place. On a
// disk the kernel spends several times as long on the files of a cluster or a database.
func memoryRoot() string {
	var fs syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(memoryDir, &fs) != nil || fs.Type != tmpfs {
		return ""
	}
	if fs.Bavail*uint64(fs.Bsize) < memoryNeeded || memoryAvailable() < memoryNeeded {
		return ""
	}
	return memoryDir
}

// memoryAvailable is what new data may occupy, in bytes; 0 where the kernel does not say.
func memoryAvailable() uint64 {
	text, _ := os.ReadFile("/proc/meminfo")
	_, line, _ := bytes.Cut(text, []byte("MemAvailable:"))
	var kib uint64
	_, _ = fmt.Sscan(string(line), &kib)
	return kib << 10
}
