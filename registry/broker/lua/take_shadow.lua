-- Claim pairs of a shadow queue: first those whose shadow worker was silent for a lease, then new ones.
-- KEYS  1 queue, 2 flow of the shadow
-- ARGV  group, consumer, id of the shadow, most pairs, most bytes, lease in ms
-- Returns the time in ms, then per pair: entry id, sealed, how often it was claimed. nil: the shadow is over.
if redis.call('HGET', KEYS[2], 'id') ~= ARGV[3] then return false end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[2], 'asked', now, 'consumer', ARGV[2])
local out, left, bytes = { now }, tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('EXISTS', KEYS[1]) == 0 then return out end
-- pcall: the group exists already.
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0')

local function add(entries, deliveries)
  -- Redis 6 answers a deleted entry with false.
  local entry = entries and entries[1]
  if not entry then return false end
  local sealed = entry[2] and entry[2][2] or ''
  table.insert(out, entry[1])
  table.insert(out, sealed)
  table.insert(out, deliveries)
  left, bytes = left - 1, bytes - #sealed
  return true
end

for _, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[6], '-', '+', left)) do
  if left < 1 or bytes <= 0 then break end
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[6], pending[1])
  -- An expired pair is gone; its claim is, too.
  if not add(claimed, pending[4] + 1) then redis.call('XACK', KEYS[1], ARGV[1], pending[1]) end
end
while left > 0 and bytes > 0 do
  local read = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
  if not read or not add(read[1] and read[1][2], 1) then break end
end
return out
