#!/bin/sh
# Makes the secrets of compose.yaml once: .env (mode 0600) and secrets/metrics-token, both beside this file.
# Existing secrets are never overwritten: delete them to get new ones.
set -eu
cd "$(dirname "$0")"
if [ -e .env ] || [ -e secrets/metrics-token ]; then
  echo 'penstock: secrets exist already (.env, secrets/metrics-token). Delete both to get new ones' >&2
  exit 1
fi
umask 077
random() { od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n'; }
mkdir -p secrets
random > secrets/metrics-token
# The users of two containers read it; the mode of the folder keeps other users of this machine out.
chmod 0444 secrets/metrics-token
{
  for role in PRODUCER GATEWAY WORKER OPERATOR CELERY WEBHOOKS SHADOW FLOWER; do
    echo "REDIS_${role}_PASSWORD=$(random)"
  done
  echo "FLOWER_PASSWORD=$(random)"
  echo "GRAFANA_PASSWORD=$(random)"
  echo "PENSTOCK_SIGNING_KEYS=main:$(head -c 32 /dev/urandom | base64)"
  echo "PENSTOCK_WEBHOOK_SECRETS=whsec_$(head -c 32 /dev/urandom | base64)"
  echo "PENSTOCK_L2_ENCRYPTION_KEY=$(random)"
  echo 'METRICS_TOKEN_FILE=./secrets/metrics-token'
} > .env
echo 'Wrote compose/.env and compose/secrets/metrics-token'
