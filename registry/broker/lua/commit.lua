-- Turn held jobs into results. Only the holder can commit, and the first commit wins.
-- KEYS  1 flow, 2-5 streams by priority, then the reply streams, then one record per job, then idempotency keys
-- ARGV  group, consumer, result_ttl_ms, reply_ttl_ms, number of replies, number of jobs, number of kinds, number of
--       idempotency keys,
--       then per stream: two ids between which the entries of its jobs are ('' when it has none),
--       then per reply stream: its cap in entries (0: keep all entries, without expiry),
--       then per kind: priority 0-3, tenant, reply index (0: none),
--       then per idempotency key: the number of its job,
--       then per job: entry id, record and, if there are several kinds, the number of its kind,
--       then per job with an account: the number of the job, the account, its tokens: of the prompt, generated
-- Returns one letter per job: 'C' committed, 'F' fenced, 'G' gone. If a key is foreign (of another type than ours), the
-- rest is done, and the error is returned: the caller quarantines the key and repeats the call.
local group, consumer, ttl, reply_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local replies, jobs, kinds, idempotent = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local INLINE_BYTES, ENTRY_BYTES, CHUNK = 4096, 65536, 1000
-- The first byte of a live record, and the flags in the second one; see ending.lua.
local QUEUED, CANCEL_REQUESTED = string.byte('QK', 1, 2)
local SUBSCRIBED, HAS_WEBHOOK, HAS_BOTH = string.byte('swb', 1, 3)

local owned = {}
for stream = 1, 4 do
  local low, high = ARGV[7 + stream * 2], ARGV[8 + stream * 2]
  local entries = {}
  owned[stream] = entries
  if low ~= '' then
    for _, pending in ipairs(redis.call('XPENDING', KEYS[1 + stream], group, low, high, 100000, consumer)) do
      entries[pending[1]] = true
    end
  end
end

-- What jobs have in common, by the word that names it.
local kind_of = {}
local at = 16 + replies
for kind = 1, kinds do
  local stream = 1 + ARGV[at + 1]
  kind_of[tostring(kind)] =
    { stream = stream, owned = owned[stream], tenant = ARGV[at + 2], reply = tonumber(ARGV[at + 3]) }
  at = at + 3
end
local idempotency_keys = {}
for index = 1, idempotent do
  idempotency_keys[tonumber(ARGV[at + index])] = KEYS[5 + replies + jobs + index]
end
local before_jobs, words = at + idempotent, kinds > 1 and 3 or 2
local paid, used = {}, {}
for a = before_jobs + jobs * words + 1, #ARGV, 4 do
  paid[tonumber(ARGV[a])] = { account = ARGV[a + 1], prompt = ARGV[a + 2], generated = ARGV[a + 3] }
end

local failed
local function has_failed(answer)
  if type(answer) == 'table' and answer.err then
    failed = answer
    return true
  end
end

local function is_foreign(answer)
  return type(answer) == 'table' and answer.err and string.find(answer.err, 'WRONGTYPE', 1, true)
end

local told = {}
local function tell(index, id, record)
  local reply = told[index]
  if not reply then
    reply = { bytes = 0, fields = {} }
    told[index] = reply
  end
  if #record > INLINE_BYTES then record = '' end
  local fields, bytes = reply.fields, reply.bytes + #record
  local last = #fields
  if last > 0 and (bytes > ENTRY_BYTES or last >= CHUNK) then
    reply.full = reply.full or {}
    table.insert(reply.full, fields)
    fields, bytes, last = {}, #record, 0
    reply.fields = fields
  end
  reply.bytes = bytes
  fields[last + 1], fields[last + 2] = id, record
end

local function tell_subscribers(events, state)
  local found = redis.pcall('XREVRANGE', events, '+', '-', 'COUNT', 1)
  if has_failed(found) then return end
  local last = found[1]
  local seq = last and tonumber(string.match(last[1], '^%d+')) + 1 or 3
  redis.call('XADD', events, seq .. '-0', 't', state, 'd', '')
  redis.call('PEXPIRE', events, ttl)
end

-- The records of the jobs that are held, by their keys. MGET returns nothing for a key that is missing or foreign.
local is_held, keys, record_of = {}, {}, {}
local kind = kind_of['1']
for job = 1, jobs do
  local a = before_jobs + (job - 1) * words
  if words == 3 then kind = kind_of[ARGV[a + 3]] end
  local entries, entry = kind.owned, ARGV[a + 1]
  if entries[entry] then
    -- A job that is named twice in one call counts once.
    entries[entry] = nil
    keys[#keys + 1] = KEYS[5 + replies + job]
    is_held[job] = true
  end
end
for from = 1, #keys, CHUNK do
  local found = redis.call('MGET', unpack(keys, from, math.min(from + CHUNK - 1, #keys)))
  for index = 1, #found do record_of[keys[from - 1 + index]] = found[index] end
end

local done, left = {}, {}
local statuses = {}
local committed = 0
-- Where the local id begins in the key of a record.
local id_at = #string.match(KEYS[6 + replies], '^.-:job:') + 1
for job = 1, jobs do
  local a = before_jobs + (job - 1) * words
  if words == 3 then kind = kind_of[ARGV[a + 3]] end
  local key, record = KEYS[5 + replies + job], ARGV[a + 2]
  if not is_held[job] then
    -- If our earlier commit had been written and its answer lost, the record has these very bytes, but for the second
    -- one, which notes a rating. A foreign one was perhaps met by that commit, whose error was lost as well.
    local kept = redis.pcall('GET', key)
    if is_foreign(kept) then failed = kept end
    local is_ours = type(kept) == 'string' and string.byte(kept) == string.byte(record)
      and string.sub(kept, 3) == string.sub(record, 3)
    statuses[job] = is_ours and 'C' or 'F'
  else
    local ended = done[kind.stream]
    if not ended then
      ended = {}
      done[kind.stream] = ended
    end
    ended[#ended + 1] = ARGV[a + 1]
    local former = record_of[key]
    if not former then
      former = redis.pcall('GETRANGE', key, 0, 1)
      if type(former) == 'table' then
        -- Any other error than that of a foreign key must not end the job.
        if not is_foreign(former) then return former end
        failed, former = former, ''
      end
    end
    local state, flag = string.byte(former, 1, 2)
    local is_live = state == QUEUED or state == CANCEL_REQUESTED
    -- A job that had ended before was counted out then. This entry was a second copy of its message.
    if is_live or former == '' then left[kind.tenant] = (left[kind.tenant] or 0) + 1 end
    if not is_live then
      statuses[job] = 'G'
    else
      statuses[job] = 'C'
      committed = committed + 1
      if paid[job] then used[#used + 1] = paid[job] end
      redis.call('SET', key, record, 'PX', ttl)
      record_of[key] = record
      if flag == HAS_WEBHOOK or flag == HAS_BOTH then queue_webhook(key, former, string.sub(record, 1, 1)) end
      if flag == SUBSCRIBED or flag == HAS_BOTH then
        tell_subscribers(key .. ':events', string.sub(record, 1, 1))
      end
      if kind.reply > 0 then tell(kind.reply, string.sub(key, id_at), record) end
      if idempotency_keys[job] then redis.call('PEXPIRE', idempotency_keys[job], ttl) end
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
  local in_flight = redis.pcall('HINCRBY', KEYS[1], 't:' .. tenant, -count)
  if not has_failed(in_flight) and in_flight <= 0 then redis.call('HDEL', KEYS[1], 't:' .. tenant) end
end
if committed > 0 then has_failed(redis.pcall('HINCRBY', KEYS[1], 'done', committed)) end
-- In this call, because it commits each job once. The key is that of usage_key.
if #used > 0 then
  local usage, month = string.gsub(KEYS[1], ':flow$', ':usage'), period(tonumber(redis.call('TIME')[1]), 'M')
  for _, job in ipairs(used) do
    local field = job.account .. ':' .. month
    has_failed(redis.pcall('HINCRBY', usage, field .. ':prompt', job.prompt))
    has_failed(redis.pcall('HINCRBY', usage, field .. ':generated', job.generated))
  end
end
for index, reply in pairs(told) do
  local key, cap = KEYS[5 + index], ARGV[16 + index]
  local entries = reply.full or {}
  table.insert(entries, reply.fields)
  for _, fields in ipairs(entries) do
    -- pcall: the reply is a hint only, and the client reads the record.
    local answer
    if cap == '0' then
      answer = redis.pcall('XADD', key, '*', unpack(fields))
    else
      answer = redis.pcall('XADD', key, 'MAXLEN', '~', cap, '*', unpack(fields))
    end
    if is_foreign(answer) then
      failed = answer
    elseif cap ~= '0' then
      redis.call('PEXPIRE', key, reply_ttl)
    end
  end
end
if failed then return failed end
return table.concat(statuses)
