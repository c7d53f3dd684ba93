#!/usr/bin/env bash
# Write the secrets that docker-compose.yml mounts: a Redis password, the token between services, an API key, what requests to
# people's own reward services are signed with; random, once. And the project's name into .env, unless one is there.
# SPO_SECRETS_PATH: a folder of their own for a second platform of this checkout.
set -euo pipefail
deploy="$(cd "$(dirname "$0")" && pwd)"
folder="${SPO_SECRETS_PATH:-$deploy/secrets}"
mkdir -p "$folder"
chmod 700 "$folder"
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
for name in redis_password spo_rpc_token spo_orchestrator_api_key spo_verifier_http_secret; do
  [ -s "$folder/$name" ] || random >"$folder/$name"
done
printf 'redis://:%s@redis:6379/0' "$(cat "$folder/redis_password")" >"$folder/spo_redis_url"
# Containers run as users of their own and read the files through bind mounts; on the host the folder keeps others out.
chmod 644 "$folder"/redis_password "$folder"/spo_*
# Volumes are named after the project: it must not follow the name of the checkout.
settings="$deploy/../.env"
grep -qs '^COMPOSE_PROJECT_NAME=' "$settings" || echo COMPOSE_PROJECT_NAME=spo >>"$settings"
echo "The API key is in $folder/spo_orchestrator_api_key"
