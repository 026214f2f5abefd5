-- Claim jobs whose lease has lapsed. A paused slot hands out none. Consumers that left long ago are deleted.
-- KEYS  1-4 streams by priority, 5 exists while the slot is paused, 6 the active version, 7 flow
-- ARGV  group, consumer, lease_ms, count, when the call was sent in ms of the server's clock
-- Returns the active version, then quadruples: band 1-4, entries, their counts of deliveries, their incidents.
local group, consumer, left = ARGV[1], ARGV[2], tonumber(ARGV[4])
local FORGET_MS = 3600000
local stale_ms = math.min(1250, math.max(250, ARGV[3] / 4))
-- If the server was paused, a call that waited in its socket would find every lease lapsed.
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[5] > stale_ms then return {} end
-- For expire.lua: how long a worker holds a job without a renewal. pcall: a server without memory refuses to write.
if tonumber(ARGV[3]) < FORGET_MS then redis.pcall('HSET', KEYS[7], 'lease', ARGV[3]) end
if redis.call('EXISTS', KEYS[5]) == 1 then return {} end
local out = { redis.call('GET', KEYS[6]) }
for band = 1, 4 do
  local stream, cursor = KEYS[band], '0-0'
  while left > 0 do
    -- The reply has two parts on Redis 6.2 and three from 7.0 on.
    local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[3], cursor, 'COUNT', left)
    local entries, deliveries, incidents = {}, {}, {}
    for _, entry in ipairs(reply[2]) do
      if entry and entry[2] then
        table.insert(entries, entry)
        table.insert(deliveries, redis.call('XPENDING', stream, group, entry[1], entry[1], 1)[1][4])
        -- pcall: an error would keep the claimed jobs from the caller. A foreign key holds no incidents.
        local known = redis.pcall('SMEMBERS', stream .. ':crashes:' .. entry[1])
        table.insert(incidents, known.err and {} or known)
      end
    end
    if #entries > 0 then
      out[#out + 1] = band
      out[#out + 1] = entries
      out[#out + 1] = deliveries
      out[#out + 1] = incidents
      left = left - #entries
    end
    cursor = reply[1]
    if cursor == '0-0' then break end
  end
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local seen = {}
    for field = 1, #info, 2 do seen[info[field]] = info[field + 1] end
    if seen['pending'] == 0 and seen['idle'] > FORGET_MS then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, seen['name'])
    end
  end
end
return out
