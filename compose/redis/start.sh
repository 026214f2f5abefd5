#!/bin/sh
# Starts redis-server with one user per role, and passes all arguments on: start.sh [--port 6379 ...].
#
#   REDIS_<ROLE>_PASSWORD  see users.sh
#   REDIS_MAXMEMORY        the memory limit, as in redis.conf (default 1gb)
#   REDIS_USERS_FILE       the users file to write (default /run/redis/users.acl)
#   REDIS_DATA             the folder of the append-only files (default /data)
set -eu
here=$(dirname "$0")
users=${REDIS_USERS_FILE:-/run/redis/users.acl}
umask 077
case $(redis-server --version) in
  *' v=6.'*) sh "$here/users.sh" 6 > "$users" ;;
  *) sh "$here/users.sh" > "$users" ;;
esac
# The server needs no passwords, so its environment must not have them.
for role in PRODUCER GATEWAY WORKER OPERATOR CELERY WEBHOOKS SHADOW FLOWER; do
  unset "REDIS_${role}_PASSWORD"
done
exec redis-server "$here/redis.conf" --aclfile "$users" --dir "${REDIS_DATA:-/data}" \
  --maxmemory "${REDIS_MAXMEMORY:-1gb}" "$@"
