#!/bin/sh
# dpkg says remove, rpm the number of versions that stay.
set -e
case "$1" in
remove | 0)
	[ ! -d /run/systemd/system ] || systemctl disable --now walpost.service
	if [ -e /etc/walpost/walpost.yaml ]; then
		echo "walpost: the replication slot stays and keeps WAL: 'walpost slot drop' first, or else SELECT pg_drop_replication_slot('walpost')"
	fi
	;;
esac
