#!/bin/sh
# The relay's user. Its group may read and write /etc/walpost, which the unit makes read-only.
set -e
getent group walpost >/dev/null || groupadd --system walpost
getent passwd walpost >/dev/null ||
	useradd --system --gid walpost --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin walpost
