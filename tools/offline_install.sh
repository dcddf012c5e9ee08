#!/bin/sh
# Install envbuild from the files beside this script, without a network: sh install [FOLDER]
# This script needs no other program: everything else is done by the Python beside it.
case $0 in
*/*) here=${0%/*} ;;
*) here=. ;;
esac
if ! "$here/python/bin/python3" -I -c ''; then
    echo "install: the Python of this file does not start here. It is for Linux on @ARCH@ with glibc." >&2
    exit 6
fi
exec "$here/python/bin/python3" -I -B "$here/install.py" "$@"
