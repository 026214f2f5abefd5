-- Start the shadow of a model, unless one runs. What the last one has left is deleted. A shadow that its canary has
-- ended runs no more, although its order is still there.
-- KEYS  1 order, 2 queue, 3 flow, 4 report, 5 worst, 6 series
-- ARGV  id, record, the time at which the shadow ends in ms, candidate, form, pairs of the canary, how long the report
--       stays after that time in ms
-- Returns the record of the shadow that runs already; nil: this one runs now.
local running = redis.call('GET', KEYS[1])
if running and redis.call('HGET', KEYS[3], 'id') ~= '' then return running end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The keys expire also when nobody stops the shadow: the order at its end, the report some time later.
local left = math.max(1, ARGV[3] - now)
redis.call('SET', KEYS[1], ARGV[2], 'PX', left)
redis.call('HSET', KEYS[3], 'id', ARGV[1], 'started', string.format('%.0f', now))
redis.call('HSET', KEYS[4], 'id', ARGV[1], 'candidate', ARGV[4], 'form', ARGV[5], 'canary_pairs', ARGV[6])
for index = 3, 4 do redis.call('PEXPIRE', KEYS[index], string.format('%.0f', left + ARGV[7])) end
return false
