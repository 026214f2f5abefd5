-- Settle one try of a webhook. Only a delivery counts when another try has begun since.
-- KEYS  1 waiting, 2 due, 3 dead, 4 event
-- ARGV  id, number of the try, outcome: delivered, later or dead, tries to keep, failures to keep, ms until the next
--       try, error, limit of dead webhooks, prefix of the keys of events
-- Returns 1, or 0 when nothing was changed.
local id, outcome, dead = ARGV[1], ARGV[3], KEYS[3]
if outcome == 'delivered' then
  local known = redis.call('ZREM', KEYS[1], id) + redis.call('ZREM', dead, id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('DEL', KEYS[4])
  return math.min(known, 1)
end
if not redis.call('ZSCORE', KEYS[1], id) or redis.call('HGET', KEYS[4], 'tries') ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[4], 'tries', ARGV[4], 'failures', ARGV[5], 'error', ARGV[7])
if outcome == 'later' then
  redis.call('ZADD', KEYS[2], now + ARGV[6], id)
  return 1
end
redis.call('ZREM', KEYS[1], id)
redis.call('ZREM', KEYS[2], id)
redis.call('ZADD', dead, now, id)
while redis.call('ZCARD', dead) > tonumber(ARGV[8]) do
  local oldest = redis.call('ZRANGE', dead, 0, 0)[1]
  redis.call('ZREM', dead, oldest)
  redis.call('DEL', ARGV[9] .. oldest)
end
return 1
