-- Count the webhooks of a model.
-- KEYS  1 waiting, 2 dead
-- Returns how many wait, how many are dead, and the ms since the job of the oldest waiting one ended; 0 without one.
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local age = 0
if oldest[2] then
  local time = redis.call('TIME')
  age = math.max(0, time[1] * 1000 + math.floor(time[2] / 1000) - oldest[2])
end
return { redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2]), age }
