#!/usr/bin/env bash
# Build the images, run the toy job in docker compose, scale inference and kill every service on the way, tear down.
# Needs a Docker engine and compose v2 (docker compose, or the path of its binary in COMPOSE). Images and bases are
# chosen by the variables of docker-compose.yml; COMPOSE_BUILD=no takes images that are there; STEPS is the length of a
# job, and when one is over the next takes its place; KILLED names the services that are killed. OLD_VERSION=tag starts
# from images of that tag (spo-light, spo-judge, spo-cpu) and upgrades under the job to those of the compose file.
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

STEPS=${STEPS:-600}
export COMPOSE_PROJECT_NAME=spo-test SPO_HTTP_PORT=${SPO_HTTP_PORT:-18080}
deploy/make_secrets.sh
finish() {
  status=$?
  [ $status -eq 0 ] || "${compose[@]}" logs --tail 30 || true
  "${compose[@]}" --profile demo down --volumes --timeout 40 || true
  exit $status
}
trap finish EXIT

say() { echo "== $(date +%T) $*"; }
url=http://127.0.0.1:$SPO_HTTP_PORT

if [ "${COMPOSE_BUILD:-yes}" = yes ]; then
  say "build"
  "${compose[@]}" build
fi
say "start${OLD_VERSION:+ from $OLD_VERSION}"
began=$SECONDS
if [ -n "${OLD_VERSION:-}" ]; then
  export SPO_LIGHT_IMAGE=spo-light:$OLD_VERSION SPO_RUNNER_IMAGE=spo-light:$OLD_VERSION
  export SPO_JUDGE_IMAGE=spo-judge:$OLD_VERSION SPO_CPU_IMAGE=spo-cpu:$OLD_VERSION
fi
"${compose[@]}" up --no-build --wait --wait-timeout 900
say "all services are healthy, after $((SECONDS - began)) s"

say "without the key the API says no"
[ "$(curl -s -m 20 -o /dev/null -w '%{http_code}' "$url/v1/jobs")" = 401 ]

python3 scripts/compose_job.py "$url" deploy/secrets/spo_orchestrator_api_key "$STEPS" "${compose[@]}"
say "tear down"
"${compose[@]}" --profile demo down --volumes --timeout 40
own="label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"
left="$(docker ps -aq --filter "$own")$(docker volume ls -q --filter "$own")$(docker network ls -q --filter "$own")"
[ -z "$left" ] || { say "left behind: $left"; exit 1; }
say "passed, after $SECONDS s"
