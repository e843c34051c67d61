#!/bin/sh
# dpkg --purge leaves nothing. An rpm leaves its user and the configuration.
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
if [ "$1" = purge ]; then
	rm -rf /etc/walpost
	# A process of the user, started by hand, keeps the user, and that its group.
	if getent passwd walpost >/dev/null && ! userdel walpost 2>/dev/null; then
		echo "walpost: the user walpost stays, because it has a process: end that, and run userdel walpost"
	elif getent group walpost >/dev/null; then
		groupdel walpost || true
	fi
fi
