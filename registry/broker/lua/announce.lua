-- Publish the active version's spec, and those of versions that jobs may name. If a version was promoted, its spec stays.
-- KEYS  1 active, 2 spec, 3 specs by version
-- ARGV  1 to replace what is there, 0 to fill in what is missing; the active version's spec; then pairs: version, spec
local replaces = ARGV[1] == '1'
-- SET replaces a key of any type. GET refuses one that holds another type.
local known = redis.call('GET', KEYS[2])
if not redis.call('GET', KEYS[1]) and known ~= ARGV[2] and (replaces or not known) then
  redis.call('SET', KEYS[2], ARGV[2])
end
for a = 3, #ARGV, 2 do
  if replaces then
    redis.call('HSET', KEYS[3], ARGV[a], ARGV[a + 1])
  else
    redis.call('HSETNX', KEYS[3], ARGV[a], ARGV[a + 1])
  end
end
return 1
