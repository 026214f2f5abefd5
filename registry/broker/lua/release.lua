-- Give held jobs back. Their counts of deliveries omit this delivery. Without a receiver the owner of the jobs is
-- `released`, with a lease that has lapsed; with a receiver it is the receiver, with a lease that begins now.
-- KEYS  1-4 streams by priority
-- ARGV  group, consumer, number of jobs, receiver or '', then per job: priority 0-3, entry id
-- Returns how many jobs were released.
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
