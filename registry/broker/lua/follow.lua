-- Note that a process waits for jobs which it has not submitted, or that it waits no longer. cancel.lua reads it.
-- KEYS  the followers of each job: a line `<until in ms> <follower>` for each
-- ARGV  ttl_ms, follower, 1 to follow or 0 to leave
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, key in ipairs(KEYS) do
  local lines, last = {}, 0
  for line in string.gmatch(redis.call('GET', key) or '', '[^\n]+') do
    local due, follower = string.match(line, '^(%d+) (.*)$')
    due = tonumber(due or '') or 0
    if due > now and follower ~= ARGV[2] then
      lines[#lines + 1] = line
      last = math.max(last, due)
    end
  end
  if ARGV[3] == '1' then
    lines[#lines + 1] = string.format('%.0f %s', now + ARGV[1], ARGV[2])
    last = math.max(last, now + ARGV[1])
  end
  if #lines == 0 then
    redis.call('PEXPIRE', key, 0)
  else
    redis.call('SET', key, table.concat(lines, '\n'), 'PX', last - now)
  end
end
return 1
