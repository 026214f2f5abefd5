-- Accept or refuse jobs, in order.
-- KEYS  1 flow, 2-5 streams by priority, then one record per job, then the idempotency keys
-- ARGV  group, max_depth, tenant_max_in_flight (0: none), ttl of the records in ms, number of jobs,
--       percentage of the server's memory beyond which no job is accepted, number of kinds, number of idempotency
--       keys, number of jobs with counted tokens,
--       then per kind: priority 0-3, tenant, reply, lifetime in ms, account that pays for the job ('' for none),
--       then per idempotency key: the number of its job, digest, fingerprint,
--       then per job with counted tokens: the number of the job, the tokens of its prompt,
--       then per job: sealed and, if there are several kinds, the number of its kind,
--       then per job with a webhook: the number of the job, the target
-- Returns per job: 'a' accepted, 'e' the id exists and its reply does not go to this client, 'k<local id>' the first job
--       of the idempotency key answers, 'c' conflict, 'f<retry ms>' queue full, 't<retry ms>' the tenant has too many
--       jobs in flight, 'm<retry ms>' the server is short of memory.
local max_depth, tenant_max, ttl, count = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local kinds, idempotent, counted = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local depths, in_flight, accepted, used, prompts = {}, {}, {}, {}, {}
local refused = 0
local LOOK_AGAIN_MS = 100

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The memory beyond the mark is for results. The answer is cached for a moment, because INFO costs more than a job.
-- pcall: at the limit Redis refuses to write, and a user without INFO gets no answer.
local function is_short_of_memory()
  local seen = redis.call('HMGET', KEYS[1], 'memory_at', 'short')
  local at = tonumber(seen[1] or '')
  local age = at and now - at
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
    in_flight[tenant] = tonumber(redis.call('HGET', KEYS[1], 't:' .. tenant) or '') or 0
  end
  return in_flight[tenant]
end

-- The time until `waiting` more jobs are committed, at the recent rate.
local function retry_ms(waiting)
  local flow = redis.call('HMGET', KEYS[1], 'done', 'mark', 'at', 'rate')
  local done, mark = tonumber(flow[1] or '') or 0, tonumber(flow[2] or '') or 0
  local at, rate = tonumber(flow[3] or ''), tonumber(flow[4] or '')
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

-- The answer for an id that has a record. The caller either has not received our first answer, or gives its jobs ids that
-- an earlier process has given them. In that case, and once the job has ended, no reply may come to this client.
-- GETRANGE refuses a foreign key, of another type: the client must not wait for that job.
local function repeated(record, client)
  local head = redis.call('GETRANGE', record, 0, 1023)
  local at = string.find(head, '\n', 1, true)
  local is_live = string.find(head, '^[QK]') and at
  return is_live and string.sub(head, at, at + #client - 1) == client and 'a' or 'e'
end

-- What jobs have in common, by the word that names it. `client` and `expires` are parts of records.
local kind_of = {}
local at = 9
for kind = 1, kinds do
  local priority, tenant, reply, lifetime = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  kind_of[tostring(kind)] = {
    priority = priority, tenant = tenant, stream = KEYS[2 + priority],
    client = '\n' .. tenant .. '\n' .. reply .. '\n',
    -- Not from the entry id: after a clock went back, ids stay ahead of it.
    expires = string.format('%.0f', now + lifetime),
    account = ARGV[at + 5],
  }
  at = at + 5
end
local idempotency_of = {}
for index = 1, idempotent do
  idempotency_of[tonumber(ARGV[at + 1])] =
    { key = KEYS[5 + count + index], digest = ARGV[at + 2], fingerprint = ARGV[at + 3] }
  at = at + 3
end
local tokens_of = {}
for _ = 1, counted do
  tokens_of[tonumber(ARGV[at + 1])] = tonumber(ARGV[at + 2])
  at = at + 2
end
local before_jobs, words = at, kinds > 1 and 2 or 1
local targets = {}
for a = before_jobs + count * words + 1, #ARGV, 2 do targets[tonumber(ARGV[a])] = ARGV[a + 1] end

local is_short = is_short_of_memory()
local out = {}
local kind = kind_of['1']
local function accept_all()
  for job = 1, count do
    local a = before_jobs + (job - 1) * words
    if words == 2 then kind = kind_of[ARGV[a + 2]] end
    local record, tenant, stream = KEYS[5 + job], kind.tenant, kind.stream
    local idempotency = idempotency_of[job]
    local first = idempotency and redis.call('GET', idempotency.key)
    if first then
      local known, owner = string.match(first, '^([^\n]*)\n(.*)$')
      out[job] = known == idempotency.fingerprint and 'k' .. owner or 'c'
    else
      local no_room = is_short and 'm' or depth_of(stream) >= max_depth and 'f'
        or tenant_max > 0 and in_flight_of(tenant) >= tenant_max and 't'
      if no_room and redis.call('EXISTS', record) == 0 then
        refused = refused + 1
        out[job] = no_room .. retry_ms(refused)
      elseif no_room then
        out[job] = repeated(record, kind.client)
      else
        local entry = redis.call('XADD', stream, '*', 'e', ARGV[a + 1])
        local target, digest = targets[job], idempotency and idempotency.digest or ''
        local head = (target and 'Qw' or 'Q-') .. kind.priority .. entry .. kind.client .. digest .. '\n'
          .. (target and target .. '\n' or '') .. kind.expires
        if redis.call('SET', record, head, 'PX', ttl, 'NX') then
          if idempotency then
            local id = string.match(record, ':job:(.*)$')
            redis.call('SET', idempotency.key, idempotency.fingerprint .. '\n' .. id, 'PX', ttl)
          end
          depths[stream] = depths[stream] + 1
          accepted[tenant] = (accepted[tenant] or 0) + 1
          if kind.account ~= '' then
            used[kind.account] = (used[kind.account] or 0) + 1
            if tokens_of[job] then prompts[kind.account] = (prompts[kind.account] or 0) + tokens_of[job] end
          end
          if in_flight[tenant] then in_flight[tenant] = in_flight[tenant] + 1 end
          out[job] = 'a'
        else
          redis.call('XDEL', stream, entry)
          out[job] = repeated(record, kind.client)
        end
      end
    end
  end
end
-- A foreign key ends the loop: the jobs before it are in the queue, and are counted all the same.
local is_whole, failure = pcall(accept_all)
for tenant, jobs in pairs(accepted) do redis.call('HINCRBY', KEYS[1], 't:' .. tenant, jobs) end
-- In this call, because it accepts each job id once: a repeated call counts nothing. The key is that of usage_key.
for account, jobs in pairs(used) do
  local usage, field = string.gsub(KEYS[1], ':flow$', ':usage'), account .. ':' .. period(tonumber(time[1]), 'M')
  redis.call('HINCRBY', usage, field, jobs)
  if prompts[account] then redis.call('HINCRBY', usage, field .. ':prompt', prompts[account]) end
end
if not is_whole then error(failure, 0) end
return out
