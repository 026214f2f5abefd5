-- Give held jobs back at once: they pass to nobody, with a lease that lapsed long ago, and keep their count of
-- deliveries as if this one had not happened.
-- KEYS  1-4 streams by priority
-- ARGV  group, consumer, number of jobs, then per job: priority 0-3, entry id
local group, consumer, LAPSED_MS = ARGV[1], ARGV[2], 86400000
local released = 0
for job = 1, tonumber(ARGV[3]) do
  local stream, entry = KEYS[1 + ARGV[2 + job * 2]], ARGV[3 + job * 2]
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1, consumer)[1]
  if pending then
    redis.call('XCLAIM', stream, group, 'released', 0, entry,
      'IDLE', LAPSED_MS, 'RETRYCOUNT', math.max(0, pending[4] - 1), 'JUSTID')
    released = released + 1
  end
end
return released
