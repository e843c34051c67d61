#!/bin/sh
# dpkg --purge leaves nothing. An rpm leaves its user and the configuration.
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
if [ "$1" = purge ]; then
	rm -rf /etc/walpost
	# A process of the user, started by hand, keeps both. userdel says so.
	! getent passwd walpost >/dev/null || userdel walpost || true
	! getent group walpost >/dev/null || groupdel walpost || true
fi
