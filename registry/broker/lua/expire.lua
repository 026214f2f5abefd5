-- End a job whose deadline or lifetime has passed and that no worker holds.
-- KEYS  1 flow, 2-5 streams by priority, 6 record
-- ARGV  group, tenant, then the arguments of `finish`: result record, local id, result_ttl_ms, reply_ttl_ms,
--       reply cap, prefix of idempotency keys
-- Returns 1 when this call ended the job, else 0.
local DEFAULT_LEASE_MS = 30000
local record = redis.call('GET', KEYS[6])
local state, _, priority, entry, tenant, _, _, expires = parts(record)
if not state or tenant ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) <= tonumber(expires) then return 0 end
local stream = KEYS[2 + priority]
-- Before the first worker there is no group, and XPENDING fails.
local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)[1]
if pending then
  -- A live worker renews its leases. After a pause of the server it needs some time: hence twice the lease.
  local lease = tonumber(redis.call('HGET', KEYS[1], 'lease') or DEFAULT_LEASE_MS)
  local is_free = pending[2] == 'released' or string.sub(pending[2], 1, 8) == 'version '
  if not is_free and pending[3] < 2 * lease then return 0 end
  redis.call('XACK', stream, ARGV[1], entry)
end
redis.call('XDEL', stream, entry)
finish(KEYS[1], KEYS[6], record,
  { record = ARGV[3], id = ARGV[4], ttl = ARGV[5], reply_ttl = ARGV[6], cap = ARGV[7], idempotency_prefix = ARGV[8] })
return 1
