-- Make a dead webhook due now, with all its tries.
-- KEYS  1 waiting, 2 due, 3 dead, 4 event
-- ARGV  id
-- Returns 1, or 0 when there is no such dead webhook.
if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
local ended = redis.call('HGET', KEYS[4], 'ended')
-- Another program deleted or changed the event.
if not string.match(ended or '', '^%d+$') then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[4], 'tries', 0, 'failures', 0)
redis.call('ZADD', KEYS[1], ended, ARGV[1])
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
return 1
