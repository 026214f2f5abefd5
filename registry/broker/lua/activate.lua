-- Make a version the active one, unless a later decision is stored.
-- KEYS  1 active, 2 spec, 3 specs by version
-- ARGV  epoch, record, version, spec
-- Returns 1 if this record is the active one now, also when it was before; else 0.
local known = redis.call('GET', KEYS[1])
local value = ARGV[1] .. ' ' .. ARGV[2]
if known and known ~= value and tonumber(string.match(known, '^%d+') or 0) >= tonumber(ARGV[1]) then return 0 end
-- SET replaces a key of any type. GET refuses one that holds another type.
redis.call('GET', KEYS[2])
redis.call('SET', KEYS[1], value)
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
return 1
