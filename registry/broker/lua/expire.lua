-- End a job whose deadline or lifetime has passed and that no worker holds.
-- KEYS  1 flow, 2-5 streams by priority, 6 record, 7 the calls for this job while its lease is not renewed
-- ARGV  group, tenant, then the arguments of `finish`: result record, local id, result_ttl_ms, reply_ttl_ms,
--       reply cap, prefix of idempotency keys
-- Returns 1 when this call ended the job, else 0.
local DEFAULT_LEASE_MS, KEEP_MS = 30000, 86400000
local record = redis.call('GET', KEYS[6])
local state, _, priority, entry, tenant, _, _, expires = parts(record)
if not state or tenant ~= ARGV[2] then return 0 end

local function clock_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

if clock_ms() <= tonumber(expires) then return 0 end

-- Whether a living worker may hold the job. A living worker renews its lease, except while the server is paused. The
-- server is paused between two calls only: a call counts the time since the call before, and a quarter of a lease at
-- most. The worker is dead when a whole lease is counted without a renewal.
local function may_be_held(idle)
  local lease = tonumber(redis.call('HGET', KEYS[1], 'lease') or '') or DEFAULT_LEASE_MS
  if idle < lease then return true end
  -- The clock of a Redis before 7.2 goes on during a script. Read before `idle` was, it would be a millisecond behind:
  -- a call in the same millisecond as the renewal would seem to be later than it.
  local now = clock_ms()
  local at, counted = string.match(redis.call('GET', KEYS[7]) or '', '^(%d+) (%d+)$')
  -- The first call since the last renewal counts nothing: the server may have been paused since then.
  local is_first = not at or now - at >= idle or now < tonumber(at)
  counted = is_first and 0 or counted + math.min(now - at, math.ceil(lease / 4))
  -- pcall: a server without memory refuses to write.
  redis.pcall('SET', KEYS[7], string.format('%.0f %.0f', now, counted), 'PX', KEEP_MS)
  return counted < lease
end

local stream = KEYS[2 + priority]
-- Before the first worker there is no group, and XPENDING fails.
local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)[1]
if pending then
  local is_free = pending[2] == 'released' or string.sub(pending[2], 1, 8) == 'version '
  if not is_free and may_be_held(pending[3]) then return 0 end
  redis.call('XACK', stream, ARGV[1], entry)
end
redis.call('XDEL', stream, entry)
finish(KEYS[1], KEYS[6], record,
  { record = ARGV[3], id = ARGV[4], ttl = ARGV[5], reply_ttl = ARGV[6], cap = ARGV[7], idempotency_prefix = ARGV[8] })
return 1
