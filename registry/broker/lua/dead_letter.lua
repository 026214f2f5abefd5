-- Move bytes to the dead letters: what cannot be a job, and jobs that are given up. If they were accepted as a job,
-- that ends with it.
-- KEYS  1 flow, 2 stream, 3 dead letters, 4 the entry's incidents, and 5 the record that the bytes claim, if they
--       claim one
-- ARGV  group, consumer, entry id, priority 0-3, reason, most dead letters, most bytes in them, when it was accepted
--       in ms, then as `finish` wants them: result record, local id, result_ttl_ms, reply_ttl_ms, reply cap, prefix of
--       idempotency keys
local entry, dead = ARGV[3], KEYS[3]
local most, most_bytes, MOST_DROPPED = tonumber(ARGV[6]), tonumber(ARGV[7]), 1000
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[1], entry, entry, 1, ARGV[2])[1]
if not pending then return 0 end
-- The bytes do not travel again: they may be large.
local kept = redis.call('XRANGE', KEYS[2], entry, entry)[1]
if not kept then return 0 end
local fields = kept[2]
-- What we wrote has its bytes in the first field; of anything else every field is kept.
local is_ours = #fields == 2 or #fields == 4 and fields[3] == 'a'
local sealed = is_ours and fields[2] or table.concat(fields)

-- Nobody vouches for the bytes: they end a job only if its record says that this very entry is it.
local record = KEYS[5] and redis.call('GET', KEYS[5])
local _, _, priority, accepted, tenant = parts(record)
local is_job = accepted == entry and priority == ARGV[4]

local letters = redis.call('XLEN', dead)
local bytes = letters > 0 and tonumber(redis.call('HGET', KEYS[1], 'dead') or 0) or 0
redis.call('XADD', dead, '*', 'reason', ARGV[5], 'e', sealed, 'entry', entry, 'priority', ARGV[4],
  'deliveries', pending[4], 'crashes', redis.call('SCARD', KEYS[4]),
  'accepted', ARGV[8], 'job', is_job and ARGV[10] or '', 'tenant', is_job and tenant or '')
letters, bytes = letters + 1, bytes + #sealed
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
    { record = ARGV[9], id = ARGV[10], ttl = ARGV[11], reply_ttl = ARGV[12], cap = ARGV[13],
      idempotency_prefix = ARGV[14] })
end
return 1
