#!/usr/bin/env bash
# Install the sandbox's programs, the browser that tests the pages and promtool, where apt-get is there and allowed; say loudly what is missing otherwise.
set -uo pipefail
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
ldconfig -p 2>/dev/null | grep -q 'libseccomp\.so\.2' || missing+=(libseccomp2)
{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || missing+=(chromium)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v ip >/dev/null || missing+=(iproute2)
command -v promtool >/dev/null || missing+=(prometheus)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; } </dev/null >/dev/null 2>&1 &&
    exit 0
fi
echo "******************************************************************************" >&2
echo "Could not install: ${missing[*]}. Please install them (as root: apt-get install ${missing[*]})." >&2
echo "Without chromium the tests of the pages are skipped (they fail where CI=true)." >&2
echo "Without promtool (prometheus) the alert rules are not tried (that fails where CI=true)." >&2
echo "Without ip (iproute2) nothing is tried on two networks (that fails where CI=true)." >&2
echo "Without a C compiler the campaign steps no clocks." >&2
echo "Without bubblewrap the judge falls back to seccomp + Landlock; without either it refuses to run programs." >&2
echo "******************************************************************************" >&2
exit 0
