#!/bin/sh
# Name a port of docker-compose.yaml that another program has: the engine would do so after half of the services are up.
#
#   sh images/compose-ports.sh [COMMAND OF COMPOSE] [FILE]
set -eu
compose=${1:-docker compose}
file=${2:-.env}

# Containers of this server have the ports themselves.
[ -z "$($compose ps -q 2>/dev/null || :)" ] || exit 0

# NAME DEFAULT: the value in the environment, or in the file of settings, as Compose reads it: with quotes and comments.
setting() {
  eval "found=\${$1-}"
  [ -n "$found" ] || found=$(sed -n "s/^\\(export *\\)\\{0,1\\}$1=//p" "$file" 2>/dev/null | tail -n 1 |
    tr -d '\r' | sed "s/^\\([\"']\\)\\(.*\\)\\1.*/\\2/; s/[[:space:]]\\{1,\\}#.*//; s/[[:space:]]*\$//")
  echo "${found:-$2}"
}

# S3 has one where a further file publishes it. Compose takes the environment's before that of the settings.
published=
case ${COMPOSE_FILE-$(setting COMPOSE_FILE "")} in
  *images/objects/published.yaml*) published=S3_PORT:9000 ;;
esac

for each in AIRFLOW_PORT:8080 MLFLOW_PORT:5000 $published; do
  name=${each%:*}
  port=$(setting "$name" "${each#*:}")
  hex=$(printf ':%04X' "$port" 2>/dev/null) || { echo "error: $name=$port in $file is no port. Give a number" >&2; exit 1; }
  # State 0A is a socket that listens.
  if cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v port="$hex" '$4 == "0A" && substr($2, length($2) - 4) == port {exit 1}'; then
    continue
  fi
  echo "error: port $port is taken by another program, and the server would publish it. Stop that one, or write another $name into $file" >&2
  exit 1
done
