#!/usr/bin/env bash
# install.sh PYTHON ARGUMENTS: what `PYTHON -m pip install ARGUMENTS` installs, by uv: it reads the index, downloads and
# unpacks in a quarter of pip's CPU time (49 s instead of 214) and beside each other. uv is told what pip is configured
# with, so that both choose the same; where it cannot be had or fails, pip installs.
set -euo pipefail
python=$1
shift
environment=$(dirname "$(dirname "$python")")
folder=$environment/.uv
# uv's lock is a file that everybody may write.
trap 'rm -rf "$folder" "$environment/.lock"' EXIT

settings=$("$python" -m pip config list)

# All that pip's files and environment say of an option, on one line.
configured() {
  sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$settings" | sed 's/\\n/ /g' | xargs
}

by_uv() {
  local uv
  if ! uv=$(command -v uv); then
    "$python" -m pip install --quiet --no-compile --target "$folder" 'uv>=0.9' || return
    uv=$folder/bin/uv
  fi
  local index links certificates
  index=$(configured index-url)
  links=$(configured find-links)
  certificates=$(configured cert)
  # Links to what lies in a cache beside the environment cost neither time nor room, and are gone with it.
  env ${index:+UV_DEFAULT_INDEX="${index##* }"} UV_EXTRA_INDEX_URL="$(configured extra-index-url)" \
    UV_FIND_LINKS="${links// /,}" UV_CONSTRAINT="$(configured constraint)" \
    ${certificates:+SSL_CERT_FILE="${certificates##* }"} UV_INDEX_STRATEGY=unsafe-best-match UV_CACHE_DIR="$folder/cache" \
    "$uv" pip install --quiet --python "$python" "$@"
}

by_uv "$@" || {
  echo "uv did not install; pip does, which takes three minutes longer" >&2
  "$python" -m pip install --quiet --no-compile "$@"
}
