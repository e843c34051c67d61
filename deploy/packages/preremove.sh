#!/bin/sh
# dpkg says remove, rpm the number of versions that stay.
set -e
case "$1" in
remove | 0) [ ! -d /run/systemd/system ] || systemctl disable --now walpost.service ;;
esac
