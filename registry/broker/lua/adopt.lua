-- Claim jobs that were released for these receivers. A paused slot hands out none.
-- KEYS  1-4 streams by priority, 5 exists while the slot is paused, 6 the active version
-- ARGV  group, consumer, count, then the receivers (see release.lua)
-- Returns the same as take_over.
local group, consumer, left = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('EXISTS', KEYS[5]) == 1 then return {} end
local out = { redis.call('GET', KEYS[6]) }
for band = 1, 4 do
  local stream = KEYS[band]
  for receiver = 4, #ARGV do
    local entries, deliveries, incidents = {}, {}, {}
    local waiting = left > 0 and redis.call('XPENDING', stream, group, '-', '+', left, ARGV[receiver]) or {}
    for _, pending in ipairs(waiting) do
      local entry = redis.call('XCLAIM', stream, group, consumer, 0, pending[1])[1]
      if entry and entry[2] then
        table.insert(entries, entry)
        table.insert(deliveries, pending[4] + 1)
        -- pcall: an error would keep the claimed jobs from the caller. A foreign key holds no incidents.
        local known = redis.pcall('SMEMBERS', stream .. ':crashes:' .. pending[1])
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
  end
end
return out
