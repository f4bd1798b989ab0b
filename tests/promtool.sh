#!/bin/sh
# Prints the path of promtool, unpacked from Debian's prometheus package into DIR where the system has none.
# Nothing is installed and no service is started. Fails with one line where it can't be had.
set -eu
dir=${1:?usage: promtool.sh DIR}
fail() {
    echo "promtool can't be had: $1" >&2
    exit 1
}
if command -v promtool; then exit; fi
tool=$dir/usr/bin/promtool
if [ ! -x "$tool" ]; then
    command -v apt-get >/dev/null || fail "no promtool on the PATH, and no apt-get"
    mkdir -p "$dir"
    cd "$dir"
    apt-get -qq download prometheus >/dev/null 2>&1 ||
        { apt-get -qq update && apt-get -qq download prometheus; } >/dev/null 2>&1 ||
        fail "apt-get download prometheus failed"
    cd "$OLDPWD"
    dpkg-deb -x "$dir"/prometheus_*.deb "$dir" || fail "the package can't be unpacked"
    rm "$dir"/prometheus_*.deb
fi
echo "$tool"
