-- Count one crash for jobs that were running when a process died. A job counts each incident once.
-- KEYS  1-4 streams by priority, then one set of incidents per job
-- ARGV  group, incident, ttl_ms, number of jobs, then per job: priority 0-3, entry id
local group, incident, ttl = ARGV[1], ARGV[2], ARGV[3]
for job = 1, tonumber(ARGV[4]) do
  local stream, entry, marks = KEYS[1 + ARGV[3 + job * 2]], ARGV[4 + job * 2], KEYS[4 + job]
  -- A job that has ended meanwhile is not counted.
  if redis.pcall('XPENDING', stream, group, entry, entry, 1)[1] then
    redis.call('SADD', marks, incident)
    redis.call('PEXPIRE', marks, ttl)
  end
end
return 1
