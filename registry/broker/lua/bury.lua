-- Move bytes that cannot be a job to the dead letters. If they were accepted as a job, that ends with it.
-- KEYS  1 flow, 2 stream, 3 dead letters, and 4 the record that the bytes claim, if they claim one
-- ARGV  group, consumer, entry id, priority 0-3, reason, sealed, then as `finish` wants them: result record, local id,
--       result_ttl_ms, reply_ttl_ms, reply cap, prefix of idempotency keys
local entry = ARGV[3]
if not redis.pcall('XPENDING', KEYS[2], ARGV[1], entry, entry, 1, ARGV[2])[1] then return 0 end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 100000, '*', 'reason', ARGV[5], 'e', ARGV[6], 'entry', entry)
redis.call('XACK', KEYS[2], ARGV[1], entry)
redis.call('XDEL', KEYS[2], entry)
-- Nobody vouches for the bytes: they end a job only if its record says that this very entry is it.
local record = KEYS[4] and redis.call('GET', KEYS[4])
local _, _, priority, accepted = parts(record)
if accepted == entry and priority == ARGV[4] then
  finish(KEYS[1], KEYS[4], record,
    { record = ARGV[7], id = ARGV[8], ttl = ARGV[9], reply_ttl = ARGV[10], cap = ARGV[11], once_prefix = ARGV[12] })
end
return 1
