-- Stop the shadow of a model: its order and its queue are deleted, its report stays for a while.
-- KEYS  1 order, 2 queue, 3 flow, 4 report, 5 worst, 6 series
-- ARGV  how long the report stays in ms
-- Returns the record of the shadow that ran and the number of pairs that were deleted; nil: none ran.
local record = redis.call('GET', KEYS[1])
if not record then return false end
local left = redis.call('XLEN', KEYS[2])
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HDEL', KEYS[3], 'id')
redis.call('HSET', KEYS[3], 'bytes', 0)
redis.call('HINCRBY', KEYS[3], 'discarded', left)
for index = 3, 6 do redis.call('PEXPIRE', KEYS[index], ARGV[1]) end
return { record, left }
