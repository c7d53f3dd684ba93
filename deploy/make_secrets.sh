#!/usr/bin/env bash
# Write the secrets that docker-compose.yml mounts: a Redis password, an API key, what requests are signed with; random, once.
set -euo pipefail
folder="$(cd "$(dirname "$0")" && pwd)/secrets"
mkdir -p "$folder"
chmod 700 "$folder"
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
if [ ! -s "$folder/redis_password" ]; then
  random >"$folder/redis_password"
fi
printf 'redis://:%s@redis:6379/0' "$(cat "$folder/redis_password")" >"$folder/spo_redis_url"
if [ ! -s "$folder/spo_orchestrator_api_key" ]; then
  random >"$folder/spo_orchestrator_api_key"
fi
# Requests to people's own reward services are signed with it.
if [ ! -s "$folder/spo_verifier_http_secret" ]; then
  random >"$folder/spo_verifier_http_secret"
fi
# Containers run as users of their own and read the files through bind mounts; on the host the folder keeps others out.
chmod 644 "$folder"/redis_password "$folder"/spo_*
echo "The API key is in $folder/spo_orchestrator_api_key"
