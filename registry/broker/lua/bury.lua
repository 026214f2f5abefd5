-- Move bytes that cannot be a job to the dead letters.
-- KEYS  1 stream, 2 dead letters
-- ARGV  group, consumer, entry id, reason, sealed
if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])[1] then return 0 end
redis.call('XADD', KEYS[2], '*', 'reason', ARGV[4], 'e', ARGV[5], 'entry', ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return 1
