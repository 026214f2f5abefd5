-- Move bytes that cannot be a job to the dead letters. If they were accepted as a job, that ends with it.
-- KEYS  1 flow, 2 stream, 3 dead letters, and 4 the record that the bytes claim, if they claim one
-- ARGV  group, consumer, entry id, reason, sealed, then as `finish` wants them: result record, local id,
--       result_ttl_ms, reply_ttl_ms, reply cap, prefix of idempotency keys
local entry = ARGV[3]
if not redis.pcall('XPENDING', KEYS[2], ARGV[1], entry, entry, 1, ARGV[2])[1] then return 0 end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 100000, '*', 'reason', ARGV[4], 'e', ARGV[5], 'entry', entry)
redis.call('XACK', KEYS[2], ARGV[1], entry)
redis.call('XDEL', KEYS[2], entry)
-- Nobody vouches for the bytes: they end a job only if its record says that this very entry is it.
local record = KEYS[4] and redis.call('GET', KEYS[4])
local _, _, _, accepted = parts(record)
if accepted == entry then
  finish(KEYS[1], KEYS[4], record,
    { record = ARGV[6], id = ARGV[7], ttl = ARGV[8], reply_ttl = ARGV[9], cap = ARGV[10], once_prefix = ARGV[11] })
end
return 1
