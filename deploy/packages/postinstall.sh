#!/bin/sh
# A first installation starts nothing: the relay is not configured yet. An upgrade restarts running relays, which
# go on where they were.
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
upgrade=
case "$1" in
configure) [ -z "$2" ] || upgrade=yes ;; # dpkg: the version that was there before
2) upgrade=yes ;;                        # rpm: the number of versions that are there now
esac
if [ -z "$upgrade" ]; then
	echo "walpost: next: runuser -u walpost -- walpost init --config /etc/walpost/walpost.yaml"
	echo "walpost: then: systemctl enable --now walpost"
elif [ -d /run/systemd/system ]; then
	systemctl try-restart walpost.service 'walpost@*.service'
fi
