-- Withdraw a waiting job, or ask the worker of a claimed one to stop.
-- KEYS  1 flow, 2-5 streams by priority, 6 record, 7 followers
-- ARGV  group, tenant, then the arguments of `finish`: result record, local id, result_ttl_ms, reply_ttl_ms,
--       reply cap, prefix of idempotency keys, then 1 to leave a job that has followers, else 0
-- Returns 'C' cancelled, 'R' requested, 'U' unknown, 'F' followed; the record of a job that had ended.
local record = redis.call('GET', KEYS[6])
if not record then return 'U' end
local state, _, priority, entry, tenant = parts(record)
if not state then return record end
if tenant ~= ARGV[2] then return 'U' end
if ARGV[9] == '1' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for due in string.gmatch(redis.call('GET', KEYS[7]) or '', '(%d+) [^\n]+') do
    if tonumber(due) > now then return 'F' end
  end
end
local stream = KEYS[2 + priority]
-- Before the first worker there is no group, and XPENDING fails.
local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)[1]
if pending and pending[2] ~= 'released' then
  redis.call('SETRANGE', KEYS[6], 0, 'K')
  return 'R'
end
if pending then redis.call('XACK', stream, ARGV[1], entry) end
redis.call('XDEL', stream, entry)
finish(KEYS[1], KEYS[6], record,
  { record = ARGV[3], id = ARGV[4], ttl = ARGV[5], reply_ttl = ARGV[6], cap = ARGV[7], idempotency_prefix = ARGV[8] })
return 'C'
