#!/bin/sh
# Write the secrets of docker-compose.yaml into .env, each made once: what is there already stays as it is.
#
#   sh images/compose-env.sh [FILE]
set -eu
umask 077
file=${1:-.env}
folder=$(dirname "$file")
new=$(mktemp "$folder/.env.new.XXXXXX")
trap 'rm -f "$new"' EXIT
trap 'exit 1' HUP INT TERM

random() { od -An -v -tx1 -N "$1" /dev/urandom | tr -d ' \n'; }

# NAME VALUE: a line for it, unless there is one with a value, as Compose reads it; the last one counts.
keep() {
  grep -Eq "^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*=[[:space:]]*[^[:space:]]" "$new" || printf '%s=%s\n' "$1" "$2" >>"$new"
}

if [ -e "$file" ]; then
  cat "$file" >"$new"
  # A last line without its end would swallow the first one of ours.
  [ -z "$(tail -c 1 "$new")" ] || echo >>"$new"
else
  echo "# Secrets of this server, made by images/compose-env.sh. Keep a copy where you keep others: without" >"$new"
  echo "# FERNET_KEY and the passwords the volumes' data cannot be read again." >>"$new"
fi
keep POSTGRES_PASSWORD "$(random 24)"
keep AIRFLOW_DB_PASSWORD "$(random 24)"
keep MLFLOW_DB_PASSWORD "$(random 24)"
keep S3_ACCESS_KEY "DF$(random 16 | tr a-f A-F)"
keep S3_SECRET_KEY "$(random 24)"
keep FERNET_KEY "$(head -c 32 /dev/urandom | base64 | tr -d '\n' | tr '+/' '-_')"
keep JWT_SECRET "$(random 64)"
keep API_SECRET_KEY "$(random 32)"
keep AIRFLOW_ADMIN_PASSWORD "$(random 9)"
keep MLFLOW_ADMIN_PASSWORD "$(random 9)"
keep MLFLOW_AIRFLOW_PASSWORD "$(random 24)"
keep MLFLOW_TRAINER_PASSWORD "$(random 24)"
keep MLFLOW_SECRET_KEY "$(random 32)"
# Of this machine's memory: half for tasks, which curate, and three quarters for trainings.
if [ -r /proc/meminfo ]; then
  megabytes=$(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
  keep SCHEDULER_MEMORY "$((megabytes / 2))m"
  keep TRAINER_MEMORY "$((megabytes * 3 / 4))m"
fi
# `gpu` where the trainer has the machine's GPUs.
grep -q "^COMPOSE_PROFILES=" "$new" || keep COMPOSE_PROFILES cpu
chmod 600 "$new"

if [ ! -e "$file" ]; then
  # A link does not replace what another process has made by now.
  if why=$(ln "$new" "$file" 2>&1); then
    echo "made $file, readable by you alone" >&2
  elif [ -e "$file" ]; then
    rm -f "$new" # `exec` runs no trap
    exec sh "$0" "$file"
  else
    echo "error: $file could not be made: $why. Name a file in a folder where you may make hard links" >&2
    exit 1
  fi
elif ! cmp -s "$new" "$file"; then
  mv "$new" "$file"
  echo "added what was missing to $file" >&2
fi
chmod 600 "$file"
