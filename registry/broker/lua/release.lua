-- Give held jobs back at once. They keep their count of deliveries as if this one had not happened, and pass to
-- nobody, with a lease that lapsed long ago; or to those that wait for them, with a lease that lapses like any other.
-- KEYS  1-4 streams by priority
-- ARGV  group, consumer, number of jobs, who waits for them or '', then per job: priority 0-3, entry id
local group, consumer, receiver, LAPSED_MS = ARGV[1], ARGV[2], ARGV[4], 86400000
local owner, idle = 'released', LAPSED_MS
if receiver ~= '' then owner, idle = receiver, 0 end
local released = 0
for job = 1, tonumber(ARGV[3]) do
  local stream, entry = KEYS[1 + ARGV[3 + job * 2]], ARGV[4 + job * 2]
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1, consumer)[1]
  if pending then
    redis.call('XCLAIM', stream, group, owner, 0, entry,
      'IDLE', idle, 'RETRYCOUNT', math.max(0, pending[4] - 1), 'JUSTID')
    released = released + 1
  end
end
return released
