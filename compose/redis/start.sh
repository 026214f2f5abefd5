#!/bin/sh
# Starts redis-server with one user per role; every argument goes to it: start.sh [--port 6379 ...].
#
#   REDIS_<ROLE>_PASSWORD  see users.sh
#   REDIS_MAXMEMORY        how much it may hold, as in redis.conf (default 1gb)
#   REDIS_USERS_FILE       where the users file is written (default /run/redis/users.acl)
#   REDIS_DATA             where its append-only files lie (default /data)
set -eu
here=$(dirname "$0")
users=${REDIS_USERS_FILE:-/run/redis/users.acl}
umask 077
case $(redis-server --version) in
  *' v=6.'*) sh "$here/users.sh" 6 > "$users" ;;
  *) sh "$here/users.sh" > "$users" ;;
esac
# The server needs no passwords, and nobody is to read them in its environment.
for role in PRODUCER WORKER OPERATOR CELERY FLOWER; do
  unset "REDIS_${role}_PASSWORD"
done
exec redis-server "$here/redis.conf" --aclfile "$users" --dir "${REDIS_DATA:-/data}" \
  --maxmemory "${REDIS_MAXMEMORY:-1gb}" "$@"
