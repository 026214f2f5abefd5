#!/bin/sh
# Prints the users file of Redis: one line per role, from the .acl files beside this one.
#
#   users.sh [6]     6: for Redis 6.2, which has no read-only (%R~) or write-only (%W~) keys, and no selectors:
#                    what parentheses allow on some keys is allowed on all keys of the role there
#
# The password of a role is REDIS_<ROLE>_PASSWORD; the file has its SHA-256. The user `health` needs no
# password and may only PING; the default user is off.
set -eu
here=$(dirname "$0")
echo 'user default off resetpass resetkeys resetchannels -@all'
echo 'user health on nopass resetkeys resetchannels -@all +ping'
for role in producer gateway worker operator celery webhooks shadow flower; do
  variable=REDIS_$(echo "$role" | tr a-z A-Z)_PASSWORD
  eval "password=\${$variable:-}"
  case $password in
    *[!A-Za-z0-9_-]*) password= ;;
  esac
  if [ "${#password}" -lt 24 ]; then
    echo "penstock: $variable is missing or weak. Expected at least 24 letters, digits, - and _" >&2
    exit 78
  fi
  digest=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
  # Rules apply from left to right: first all rights are removed, then the role's own rules follow.
  sed -e 's/#.*//' "$here/$role.acl" | tr -s ' \n' ' ' | sed \
    -e "s/^ *user $role on/user $role on #$digest resetkeys resetchannels -@all/" \
    -e "$([ "${1:-}" = 6 ] && echo 's/%[RW]*~/~/g; s/[()]//g')"
  echo
done
