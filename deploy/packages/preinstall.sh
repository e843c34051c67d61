#!/bin/sh
# The relay's user. It owns no file; its group may read the configuration.
set -e
getent group walpost >/dev/null || groupadd --system walpost
getent passwd walpost >/dev/null ||
	useradd --system --gid walpost --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin walpost
