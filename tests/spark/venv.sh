#!/bin/sh
# Makes a virtual environment DIR with PySpark, for `make test-spark`, where it is not there yet. Needs Java 17,
# which it installs on Debian where there is none and it may. Fails with one line where it can't be had.
set -eu
dir=${1:?usage: venv.sh DIR}
fail() {
    echo "Spark can't be had: $1" >&2
    exit 1
}
if ! command -v java >/dev/null; then
    command -v apt-get >/dev/null || fail "no java on the PATH, and no apt-get"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends openjdk-17-jre-headless; } >/dev/null 2>&1 ||
        fail "no java on the PATH, and apt-get install openjdk-17-jre-headless failed"
fi
[ -e "$dir/.made" ] && exit
rm -rf "$dir"
"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check pyspark==4.3.0 >"$dir/pip.log" 2>&1 ||
    fail "pip install pyspark failed: $(tail -n 1 "$dir/pip.log")"
touch "$dir/.made"
