#!/usr/bin/env bash
# Proves the image and docker-compose.yml on a real Docker engine: builds, starts, chats, kills an engine, chats again.
#
#   deploy/docker/prove.sh            on any machine with Docker and docker-compose (or compose v2)
#   KEEP=1 deploy/docker/prove.sh     leaves the stack running
#   BUILD=0 deploy/docker/prove.sh    uses the image tandem:latest as it is
set -euo pipefail
cd "$(dirname "$0")/../.."
export PORT=${PORT:-8000} COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-tandemproof} TANDEM_IMAGE=${TANDEM_IMAGE:-tandem:latest}
url=http://127.0.0.1:$PORT
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
die() {
    say "FAILED: $*"
    "${compose[@]}" ps || true
    "${compose[@]}" logs --tail 20 || true
    exit 1
}
finish() { [ "${KEEP:-0}" = 1 ] || "${compose[@]}" down -v --remove-orphans >/dev/null 2>&1 || true; }
trap finish EXIT

chat() {
    curl -sS --max-time 120 -w '\n%{http_code}' "$url/v1/chat/completions" -H 'content-type: application/json' \
        -d '{"model":"'"$model"'","temperature":0,"max_tokens":24,"messages":[{"role":"user","content":"Name three fruits."}]}'
}
answer() { # prints the text of a 200, or fails
    local got
    got=$(chat) || return 1
    [ "$(tail -n 1 <<<"$got")" = 200 ] || { echo "$got" >&2; return 1; }
    sed '$d' <<<"$got" | python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
}
ready() {
    for _ in $(seq 180); do
        curl -fsS -o /dev/null --max-time 5 "$url/ready" 2>/dev/null && return
        sleep 1
    done
    die "not ready after 180 s"
}
id_of() { "${compose[@]}" ps -q "$1"; }
health_of() { docker inspect -f '{{.State.Health.Status}}' "$(id_of "$1")"; }

"${compose[@]}" -f docker-compose.yml -f docker-compose.nvidia.yml config -q || die "the NVIDIA override is not valid"
"${compose[@]}" config -q || die "docker-compose.yml is not valid"
if [ "${BUILD:-1}" = 1 ]; then
    say "building $TANDEM_IMAGE"
    docker build --network host -t "$TANDEM_IMAGE" . || die "the image does not build"
fi
say "image: $(docker image inspect -f '{{.Size}}' "$TANDEM_IMAGE" | awk '{printf "%.2f GB", $1/1e9}')"
user=$(docker run --rm --entrypoint id "$TANDEM_IMAGE" -u)
[ "$user" != 0 ] || die "the image runs as root"
say "runs as uid $user"

"${compose[@]}" down -v --remove-orphans >/dev/null 2>&1 || true
"${compose[@]}" up -d --no-build || die "the stack does not start"
ready
model=$(curl -fsS "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
say "ready; serves $model"
first=$(answer) || die "the first chat"
say "answer: $first"

for _ in $(seq 90); do
    bad=0
    for service in gateway router engine-a engine-b draft-a draft-b; do
        [ "$(health_of "$service")" = healthy ] || bad=1
    done
    [ "$bad" = 0 ] && break
    sleep 1
done
[ "$bad" = 0 ] || die "not every service is healthy"
say "all six services are healthy"

for engine in engine-a engine-b; do
    say "killing $engine"
    docker kill "$(id_of "$engine")" >/dev/null
    second=$(answer) || die "no answer after $engine was killed"
    [ "$first" = "$second" ] || die "another answer after $engine was killed: $second"
    say "the other engine gives the same answer"
    "${compose[@]}" up -d --no-build "$engine" >/dev/null 2>&1
    for _ in $(seq 120); do
        [ "$(health_of "$engine")" = healthy ] && break
        sleep 1
    done
    [ "$(health_of "$engine")" = healthy ] || die "$engine did not come back"
    say "$engine is back"
    sleep 3
done

say "stopping both drafts: a broken draft must not stop the rest"
"${compose[@]}" stop -t 5 draft-a draft-b >/dev/null 2>&1
third=$(answer) || die "no answer without drafts"
[ "$first" = "$third" ] || die "another answer without drafts: $third"
say "PROVEN"
