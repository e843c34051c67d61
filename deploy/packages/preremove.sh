#!/bin/sh
# dpkg says remove, rpm the number of versions that stay.
set -e
case "$1" in
remove | 0)
	[ ! -d /run/systemd/system ] || systemctl stop walpost.service 'walpost@*.service'
	# --root: it also works where systemd does not run. A template stands for all that are made of it.
	! command -v systemctl >/dev/null || systemctl --root=/ --quiet disable walpost.service walpost@.service
	for config in /etc/walpost/*.yaml; do
		[ -e "$config" ] || continue
		echo "walpost: the replication slot of $config stays and keeps WAL: 'walpost slot drop --config $config' first," \
			"or else SELECT pg_drop_replication_slot('...') in PostgreSQL"
	done
	;;
esac
