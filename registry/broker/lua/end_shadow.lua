-- End a shadow from its shadow worker: its canary has refused the candidate. Its pairs are deleted, its report stays.
-- The order is an operator's and stays until its time is over, but no worker and no shadow worker follows it any more.
-- KEYS  1 queue, 2 flow of the shadow, 3 report
-- ARGV  id of the shadow, why it ends
-- Returns the number of pairs that were deleted; nil: it had ended already.
if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] then return false end
local left = redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
redis.call('HSET', KEYS[2], 'id', '', 'bytes', 0)
redis.call('HINCRBY', KEYS[2], 'discarded', left)
redis.call('HSET', KEYS[3], 'ended', ARGV[2])
return left
