# Makes the data once, with the password of POSTGRES_PASSWORD and what /docker-entrypoint-initdb.d asks for, and serves them.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb --username=postgres --pwfile=/tmp/password --auth-local=trust --auth-host=scram-sha-256 "$PGDATA"
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  pg_ctl --wait --options="-c listen_addresses=" start
  for file in /docker-entrypoint-initdb.d/*.sql; do psql --username=postgres --file="$file"; done
  pg_ctl --wait stop
fi
exec postgres -c listen_addresses='*'
