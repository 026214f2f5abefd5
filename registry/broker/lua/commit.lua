-- Turn held jobs into results. Only the holder can commit, and the first commit wins.
-- KEYS  1 flow, 2-5 streams by priority, then the reply streams, then one record per job, then idempotency keys
-- ARGV  group, consumer, result_ttl_ms, reply_ttl_ms, number of replies, number of jobs,
--       then per stream: lowest and highest entry id among the jobs ('' when none),
--       then per reply stream: its cap in entries (0: keep all entries, without expiry),
--       then per job: priority 0-3, entry id, local id, record, tenant, reply index (0: none),
--       idempotency index (0: none)
-- Returns one letter per job: 'C' committed, 'F' fenced, 'G' gone.
local group, consumer, ttl, reply_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local replies, jobs = tonumber(ARGV[5]), tonumber(ARGV[6])
local INLINE_BYTES, ENTRY_BYTES, CHUNK = 4096, 65536, 1000

local owned = {}
for stream = 1, 4 do
  local low, high = ARGV[5 + stream * 2], ARGV[6 + stream * 2]
  owned[stream] = {}
  if low ~= '' then
    for _, pending in ipairs(redis.call('XPENDING', KEYS[1 + stream], group, low, high, 100000, consumer)) do
      owned[stream][pending[1]] = true
    end
  end
end

local told = {}
local function tell(index, id, record)
  local reply = told[index]
  if not reply then
    reply = { bytes = 0 }
    told[index] = reply
  end
  if #record > INLINE_BYTES then record = '' end
  if reply.fields and (reply.bytes + #record > ENTRY_BYTES or #reply.fields >= CHUNK) then
    reply.full = reply.full or {}
    table.insert(reply.full, reply.fields)
    reply.fields, reply.bytes = nil, 0
  end
  reply.fields = reply.fields or {}
  reply.bytes = reply.bytes + #record
  table.insert(reply.fields, id)
  table.insert(reply.fields, record)
end

local function tell_subscribers(events, state)
  local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
  local seq = last and tonumber(string.match(last[1], '^%d+')) + 1 or 3
  redis.call('XADD', events, seq .. '-0', 't', state, 'd', '')
  redis.call('PEXPIRE', events, ttl)
end

local done, left = {}, {}
local statuses = {}
local committed = 0
local first_job = 14 + replies
for job = 1, jobs do
  local a = first_job + (job - 1) * 7
  local stream, entry, id, record = 1 + ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local key = KEYS[5 + replies + job]
  if not owned[stream][entry] then
    -- If our earlier commit had been written and its answer lost, the record has these very bytes.
    statuses[job] = redis.call('GET', key) == record and 'C' or 'F'
  else
    -- A job that is named twice in one call counts once.
    owned[stream][entry] = nil
    done[stream] = done[stream] or {}
    table.insert(done[stream], entry)
    local head = redis.call('GETRANGE', key, 0, 1)
    local state = string.sub(head, 1, 1)
    local is_live = state == 'Q' or state == 'K'
    -- A job that had ended before was counted out then. This entry was a second copy of its message.
    if is_live or head == '' then left[ARGV[a + 5]] = (left[ARGV[a + 5]] or 0) + 1 end
    if not is_live then
      statuses[job] = 'G'
    else
      statuses[job] = 'C'
      committed = committed + 1
      redis.call('SET', key, record, 'PX', ttl)
      local reply, idempotency = tonumber(ARGV[a + 6]), tonumber(ARGV[a + 7])
      if string.sub(head, 2, 2) == 's' then
        tell_subscribers(key .. ':events', string.sub(record, 1, 1))
      end
      if reply > 0 then tell(reply, id, record) end
      if idempotency > 0 then redis.call('PEXPIRE', KEYS[5 + replies + jobs + idempotency], ttl) end
    end
  end
end

for stream, entries in pairs(done) do
  for from = 1, #entries, CHUNK do
    local to = math.min(from + CHUNK - 1, #entries)
    redis.call('XACK', KEYS[1 + stream], group, unpack(entries, from, to))
    redis.call('XDEL', KEYS[1 + stream], unpack(entries, from, to))
  end
end
for tenant, count in pairs(left) do
  if redis.call('HINCRBY', KEYS[1], 't:' .. tenant, -count) <= 0 then redis.call('HDEL', KEYS[1], 't:' .. tenant) end
end
if committed > 0 then redis.call('HINCRBY', KEYS[1], 'done', committed) end
for index, reply in pairs(told) do
  local key, cap = KEYS[5 + index], ARGV[14 + index]
  local entries = reply.full or {}
  table.insert(entries, reply.fields)
  for _, fields in ipairs(entries) do
    -- pcall: the reply is a hint only. If the key holds another type, the client reads the record.
    if cap == '0' then
      redis.pcall('XADD', key, '*', unpack(fields))
    else
      redis.pcall('XADD', key, 'MAXLEN', '~', cap, '*', unpack(fields))
    end
  end
  if cap ~= '0' then redis.call('PEXPIRE', key, reply_ttl) end
end
return table.concat(statuses)
