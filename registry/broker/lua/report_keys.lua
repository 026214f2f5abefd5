-- Publish which signing keys a worker has, or withdraw that. Reports that were not repeated in time are dropped.
-- KEYS  1 keyrings: a line `<until in ms> <report>` for each worker
-- ARGV  ttl_ms, report, 1 to publish or 0 to withdraw
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lines, ttl = {}, tonumber(ARGV[1])
for line in string.gmatch(redis.call('GET', KEYS[1]) or '', '[^\n]+') do
  local due, report = string.match(line, '^(%d+) (.*)$')
  if due and tonumber(due) > now and report ~= ARGV[2] then lines[#lines + 1] = line end
end
if ARGV[3] == '1' then lines[#lines + 1] = string.format('%.0f %s', now + ttl, ARGV[2]) end
if #lines == 0 then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], table.concat(lines, '\n'), 'PX', ttl)
return 1
