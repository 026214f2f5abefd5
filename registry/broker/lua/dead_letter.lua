-- Move an entry to the dead letters: bytes that are no job, or a job that is given up. The job of the entry ends.
-- KEYS  1 flow, 2 stream, 3 dead letters, 4 the entry's incidents, and 5 the record of the job that the bytes claim
--       to be, if they claim one
-- ARGV  group, consumer, entry id, priority 0-3, reason, limit of dead letters, limit of their bytes, when it was
--       accepted in ms, then the arguments of `finish`: result record, local id, result_ttl_ms, reply_ttl_ms,
--       reply cap, prefix of idempotency keys
-- Returns 1, or 0 when the consumer does not hold the entry.
local entry, dead = ARGV[3], KEYS[3]
local most, most_bytes, MOST_DROPPED = tonumber(ARGV[6]), tonumber(ARGV[7]), 1000
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[1], entry, entry, 1, ARGV[2])[1]
if not pending then return 0 end
-- The bytes may be large, so the caller does not send them again.
local kept = redis.call('XRANGE', KEYS[2], entry, entry)[1]
if not kept then return 0 end
local fields = kept[2]
-- Our entries have their bytes in the first field. Of foreign entries, every field is kept.
local is_ours = #fields == 2 or #fields == 4 and fields[3] == 'a'
local sealed = is_ours and fields[2] or table.concat(fields)

-- The bytes are not trusted: they end a job only if its record names this very entry.
local record = KEYS[5] and redis.call('GET', KEYS[5])
local _, _, priority, accepted, tenant = parts(record)
local is_job = accepted == entry and priority == ARGV[4]

local letters = redis.call('XLEN', dead)
local bytes = letters > 0 and tonumber(redis.call('HGET', KEYS[1], 'dead') or '') or 0
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
