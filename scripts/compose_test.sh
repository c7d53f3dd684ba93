#!/usr/bin/env bash
# Build the images, run the toy job in docker compose, kill and scale inference on the way, tear down.
# Needs a Docker engine and compose v2 (docker compose, or the path of its binary in COMPOSE). Images and bases are
# chosen by the variables of docker-compose.yml; COMPOSE_BUILD=no takes images that are there.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
  echo "******************************************************************************" >&2
  echo "compose-test SKIPPED: $1. The images and docker-compose.yml were NOT tested." >&2
  echo "******************************************************************************" >&2
  exit 0
}
command -v docker >/dev/null || skip "there is no docker command"
docker info >/dev/null 2>&1 || skip "no Docker engine answers"
read -ra compose <<<"${COMPOSE:-docker compose}"
"${compose[@]}" version >/dev/null 2>&1 || skip "there is no compose v2 (${compose[*]})"

export COMPOSE_PROJECT_NAME=spo-test SPO_HTTP_PORT=${SPO_HTTP_PORT:-18080}
deploy/make_secrets.sh
key=$(cat deploy/secrets/spo_orchestrator_api_key)
work=$(mktemp -d)
finish() {
  status=$?
  [ $status -eq 0 ] || "${compose[@]}" logs --tail 30 || true
  "${compose[@]}" --profile demo down --volumes --timeout 40 || true
  rm -rf "$work"
  exit $status
}
trap finish EXIT

ask() { curl -sS --fail-with-body -m 20 -H "Authorization: Bearer $key" "$@"; }
say() { echo "== $(date +%T) $*"; }
url=http://127.0.0.1:$SPO_HTTP_PORT

if [ "${COMPOSE_BUILD:-yes}" = yes ]; then
  say "build"
  "${compose[@]}" build
fi
say "start"
"${compose[@]}" up --wait --wait-timeout 600

say "without the key the API says no"
[ "$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/jobs")" = 401 ]

say "pi0 of the toy contest"
model=$("${compose[@]}" --profile demo run --rm -T toy-model | python3 -c '
import json, sys
print([json.loads(line)["folder"] for line in sys.stdin if "folder" in line][-1])')
"${compose[@]}" run --rm -T --no-deps --entrypoint python orchestrator -c '
import json, sys, yaml
spec = yaml.safe_load(open("/usr/share/spo/recipes/toy/demo.yaml"))
spec["model"]["path"] = sys.argv[1]
spec["trainer"]["steps"] = 40
print(json.dumps(spec))' "$model" >"$work/spec.json"
job=$(ask -H 'Content-Type: application/json' -d @"$work/spec.json" "$url/v1/jobs" |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
say "job $job"

state() { ask "$url/v1/jobs/$job" | python3 -c 'import json, sys; print(json.load(sys.stdin)["state"])'; }
await() {
  for _ in $(seq "$1"); do
    now=$(state)
    case " $2 " in *" $now "*) say "job is $now"; return ;; esac
    case " succeeded failed cancelled " in *" $now "*) say "job is $now, waited for $2"; return 1 ;; esac
    sleep 2
  done
  say "job is still $now, waited for $2"
  return 1
}
await 300 running
say "inference 1 -> 3, one of them killed"
"${compose[@]}" up --wait --no-recreate --scale inference=3
docker kill --signal KILL "$("${compose[@]}" ps -q inference | head -1)"
await 900 succeeded
say "inference 3 -> 1"
"${compose[@]}" up --wait --no-recreate --scale inference=1
say "passed"
