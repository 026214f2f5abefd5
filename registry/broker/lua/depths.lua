-- Measure the four queues: jobs, running jobs, when the oldest waiting job was accepted in ms (0: none waits).
-- KEYS  1-4 streams by priority
-- ARGV  group
-- Returns now_ms, then jobs, running, oldest per stream.
local time = redis.call('TIME')
local out = { time[1] * 1000 + math.floor(time[2] / 1000) }
for band = 1, 4 do
  local stream = KEYS[band]
  local jobs, running, oldest = redis.call('XLEN', stream), 0, 0
  if jobs > 0 then
    local delivered = '0-0'
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local info = {}
      for field = 1, #group, 2 do info[group[field]] = group[field + 1] end
      if info['name'] == ARGV[1] then
        delivered = info['last-delivered-id']
        running = info['pending']
      end
    end
    local head = redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', 1)[1]
    oldest = head and tonumber(string.match(head[1], '^%d+')) or 0
  end
  out[#out + 1] = jobs
  out[#out + 1] = running
  out[#out + 1] = oldest
end
return out
