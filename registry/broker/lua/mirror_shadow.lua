-- Append pairs to the shadow queue of a model, up to its caps. Pairs that are too old make room.
-- KEYS  1 queue, 2 flow of the shadow, 3 flow of the model
-- ARGV  id of the shadow, most pairs, most bytes, lifetime of a pair in ms, pairs that the worker has dropped,
--       then the pairs
-- Returns how many were appended and how many were dropped because the queue is full; nil: the shadow is over.
if redis.call('HGET', KEYS[2], 'id') ~= ARGV[1] then return false end
local most_pairs, most_bytes, ttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local pairs_here = redis.call('XLEN', KEYS[1])
-- The queue may have expired as a whole: then nothing is in it, whatever was counted.
local bytes = pairs_here > 0 and tonumber(redis.call('HGET', KEYS[2], 'bytes') or '0') or 0
local expired, mirrored, dropped = 0, 0, 0

if pairs_here > 0 then
  local time = redis.call('TIME')
  local oldest = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) - ttl)
  -- A few more than are appended, so that old pairs leave faster than new ones come.
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', oldest, 'COUNT', math.min(#ARGV, 64))) do
    redis.call('XDEL', KEYS[1], entry[1])
    bytes = bytes - #(entry[2][2] or '')
    pairs_here, expired = pairs_here - 1, expired + 1
  end
end

-- The memory that the server keeps for results is not for pairs; see publish.lua.
local is_short = redis.call('HGET', KEYS[3], 'short') == '1'
for index = 6, #ARGV do
  local size = #ARGV[index]
  if is_short or pairs_here >= most_pairs or bytes + size > most_bytes then
    dropped = dropped + 1
  else
    redis.call('XADD', KEYS[1], '*', 'e', ARGV[index])
    pairs_here, bytes, mirrored = pairs_here + 1, bytes + size, mirrored + 1
  end
end
if mirrored > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
redis.call('HSET', KEYS[2], 'bytes', string.format('%.0f', math.max(0, bytes)))
for name, count in pairs({ mirrored = mirrored, full = dropped, expired = expired, behind = tonumber(ARGV[5]) }) do
  if count > 0 then redis.call('HINCRBY', KEYS[2], name, count) end
end
return { mirrored, dropped }
