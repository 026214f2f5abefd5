-- Move bytes to the dead letters: what cannot be a job, and jobs that are given up. If they were accepted as a job,
-- that ends with it.
-- KEYS  1 flow, 2 stream, 3 dead letters, 4 the entry's incidents, and 5 the record that the bytes claim, if they
--       claim one
-- ARGV  group, consumer, entry id, priority 0-3, reason, sealed, most dead letters, most bytes in them, when it was
--       accepted in ms, then as `finish` wants them: result record, local id, result_ttl_ms, reply_ttl_ms, reply cap,
--       prefix of idempotency keys
local entry, dead = ARGV[3], KEYS[3]
local most, most_bytes, MOST_DROPPED = tonumber(ARGV[7]), tonumber(ARGV[8]), 1000
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[1], entry, entry, 1, ARGV[2])[1]
if not pending then return 0 end

-- Nobody vouches for the bytes: they end a job only if its record says that this very entry is it.
local record = KEYS[5] and redis.call('GET', KEYS[5])
local _, _, priority, accepted, tenant = parts(record)
local is_job = accepted == entry and priority == ARGV[4]

local letters = redis.call('XLEN', dead)
local bytes = letters > 0 and tonumber(redis.call('HGET', KEYS[1], 'dead') or 0) or 0
redis.call('XADD', dead, '*', 'reason', ARGV[5], 'e', ARGV[6], 'entry', entry, 'priority', ARGV[4],
  'deliveries', pending[4], 'crashes', redis.call('SCARD', KEYS[4]),
  'accepted', ARGV[9], 'job', is_job and ARGV[11] or '', 'tenant', is_job and tenant or '')
letters, bytes = letters + 1, bytes + #ARGV[6]
for _ = 1, MOST_DROPPED do
  if letters == 1 or (letters <= most and bytes <= most_bytes) then break end
  local oldest = redis.call('XRANGE', dead, '-', '+', 'COUNT', 1)[1]
  redis.call('XDEL', dead, oldest[1])
  letters, bytes = letters - 1, bytes - #(oldest[2][4] or '')
end
redis.call('HSET', KEYS[1], 'dead', bytes)

redis.call('XACK', KEYS[2], ARGV[1], entry)
redis.call('XDEL', KEYS[2], entry)
redis.call('DEL', KEYS[4])
if is_job then
  finish(KEYS[1], KEYS[5], record,
    { record = ARGV[10], id = ARGV[11], ttl = ARGV[12], reply_ttl = ARGV[13], cap = ARGV[14], once_prefix = ARGV[15] })
end
return 1
