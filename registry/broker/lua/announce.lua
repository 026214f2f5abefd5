-- Publish the active version's spec. If a version was promoted, its spec stays.
-- KEYS  1 active, 2 spec
-- ARGV  spec
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SET', KEYS[2], ARGV[1]) end
return 1
