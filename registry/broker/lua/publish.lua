-- Accept or refuse jobs, in order.
-- KEYS  1 flow, 2-5 streams by priority, then one record per job, then the idempotency keys
-- ARGV  group, max_depth, tenant_max_in_flight (0: none), ttl of the records in ms, number of jobs,
--       percentage of the server's memory beyond which no job is accepted, then per job: priority 0-3, sealed,
--       local id, tenant, reply, digest of the idempotency key ('' without), index into the idempotency keys
--       (0 without), fingerprint, lifetime in ms
-- Returns per job: 'a' accepted, 'k<local id>' the first job of the idempotency key answers, 'c' conflict,
--       'f<retry ms>' queue full, 't<retry ms>' the tenant has too many jobs in flight, 'm<retry ms>' the server is
--       short of memory.
local max_depth, tenant_max, ttl, count = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local depths, in_flight, accepted = {}, {}, {}
local refused = 0
local LOOK_AGAIN_MS = 100

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The memory beyond the mark is for results. The answer is cached for a moment, because INFO costs more than a job.
-- pcall: at the limit Redis refuses to write, and a user without INFO gets no answer.
local function is_short_of_memory()
  local seen = redis.call('HMGET', KEYS[1], 'memory_at', 'short')
  local age = seen[1] and now - seen[1]
  if age and age >= 0 and age < LOOK_AGAIN_MS then return seen[2] == '1' end
  local info = redis.pcall('INFO', 'memory')
  local used = type(info) == 'string' and tonumber(string.match(info, 'used_memory:(%d+)'))
  local most = used and tonumber(string.match(info, 'maxmemory:(%d+)')) or 0
  local is_short = most > 0 and used > most * ARGV[6] / 100
  redis.pcall('HSET', KEYS[1], 'memory_at', now, 'short', is_short and '1' or '0')
  return is_short
end

local function depth_of(stream)
  if not depths[stream] then depths[stream] = redis.call('XLEN', stream) end
  return depths[stream]
end

local function in_flight_of(tenant)
  if not in_flight[tenant] then
    in_flight[tenant] = tonumber(redis.call('HGET', KEYS[1], 't:' .. tenant) or 0)
  end
  return in_flight[tenant]
end

-- The time until `waiting` more jobs are committed, at the recent rate.
local function retry_ms(waiting)
  local flow = redis.call('HMGET', KEYS[1], 'done', 'mark', 'at', 'rate')
  local done, mark, at, rate = tonumber(flow[1] or 0), tonumber(flow[2] or 0), tonumber(flow[3]), tonumber(flow[4])
  local elapsed = at and now - at
  if not elapsed or elapsed < 0 or elapsed > 30000 then
    redis.pcall('HSET', KEYS[1], 'mark', done, 'at', now)
  elseif elapsed >= 500 then
    rate = (done - mark) / elapsed
    redis.pcall('HSET', KEYS[1], 'mark', done, 'at', now, 'rate', string.format('%.6f', rate))
  end
  if not rate or rate <= 0 then return 1000 end
  return math.max(10, math.min(30000, math.ceil(waiting / rate)))
end

local is_short = is_short_of_memory()
local out = {}
for job = 1, count do
  local a = 6 + (job - 1) * 9
  local priority, sealed, id, tenant, reply = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]
  local digest, digest_index, fingerprint, lifetime = ARGV[a + 6], tonumber(ARGV[a + 7]), ARGV[a + 8], ARGV[a + 9]
  local record, stream = KEYS[5 + job], KEYS[2 + priority]
  local idempotency_key = digest_index > 0 and KEYS[5 + count + digest_index]
  local first = idempotency_key and redis.call('GET', idempotency_key)
  if first then
    local known, owner = string.match(first, '^([^\n]*)\n(.*)$')
    out[job] = known == fingerprint and 'k' .. owner or 'c'
  else
    local no_room = is_short and 'm' or depth_of(stream) >= max_depth and 'f'
      or tenant_max > 0 and in_flight_of(tenant) >= tenant_max and 't'
    if no_room and redis.call('EXISTS', record) == 0 then
      refused = refused + 1
      out[job] = no_room .. retry_ms(refused)
    elseif no_room then
      -- The same id again: the client has not received our first answer.
      out[job] = 'a'
    else
      local entry = redis.call('XADD', stream, '*', 'e', sealed)
      -- Not from the entry id: after a clock went back, ids stay ahead of it.
      local expires = string.format('%.0f', now + lifetime)
      local head = 'Q-' .. priority .. entry .. '\n' .. tenant .. '\n' .. reply .. '\n' .. digest .. '\n' .. expires
      if redis.call('SET', record, head, 'PX', ttl, 'NX') then
        if idempotency_key then redis.call('SET', idempotency_key, fingerprint .. '\n' .. id, 'PX', ttl) end
        depths[stream] = depth_of(stream) + 1
        accepted[tenant] = (accepted[tenant] or 0) + 1
        if in_flight[tenant] then in_flight[tenant] = in_flight[tenant] + 1 end
      else
        -- The same id again.
        redis.call('XDEL', stream, entry)
      end
      out[job] = 'a'
    end
  end
end
for tenant, jobs in pairs(accepted) do redis.call('HINCRBY', KEYS[1], 't:' .. tenant, jobs) end
return out
