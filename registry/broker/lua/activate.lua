-- Make a version the one that answers, unless a later decision stands already.
-- KEYS  1 active, 2 spec, 3 specs by version
-- ARGV  epoch, record, version, spec
-- Returns whether it is the one now, 0/1: also when this very record stood there.
local known = redis.call('GET', KEYS[1])
local value = ARGV[1] .. ' ' .. ARGV[2]
if known and known ~= value and tonumber(string.match(known, '^%d+') or 0) >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], value)
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
return 1
