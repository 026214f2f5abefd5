-- Quarantine foreign keys: those that hold another type than ours do. They are renamed, so that ours can be made anew.
-- KEYS  1 the quarantine of the slot: the names of what was quarantined, by time; then the keys to check
-- ARGV  how many to keep, then the type of each key ('': quarantine it, whatever it holds; 'counters': a hash of whole
--       numbers, but for the fields `rate` and `period`)
-- Returns the names of what was quarantined now: <quarantine>:<ms>:<type>:<former key>.
local quarantine, most, out = KEYS[1], tonumber(ARGV[1]), {}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function are_counters(key)
  local found = redis.call('HGETALL', key)
  for at = 1, #found, 2 do
    local name, value = found[at], found[at + 1]
    local is_number = value == '0' or string.match(value, '^-?[1-9]%d*$')
    -- The next longer one would overflow.
    if name ~= 'rate' and name ~= 'period' and (not is_number or #value > 18) then return false end
  end
  return true
end

local function check(key, expected)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' or kind == expected then return end
  if kind == 'hash' and expected == 'counters' and are_counters(key) then return end
  local name, ms = nil, now
  repeat
    name = quarantine .. ':' .. string.format('%.0f', ms) .. ':' .. kind .. ':' .. key
    ms = ms + 1
  until redis.call('EXISTS', name) == 0
  redis.call('RENAME', key, name)
  table.insert(out, name)
end

check(quarantine, 'zset')
for index = 2, #KEYS do check(KEYS[index], ARGV[index]) end
if #out == 0 then return out end
for _, name in ipairs(out) do redis.call('ZADD', quarantine, now, name) end
local excess = redis.call('ZCARD', quarantine) - most
if excess > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', quarantine, 0, excess - 1)) do
    redis.call('UNLINK', oldest)
    redis.call('ZREM', quarantine, oldest)
  end
end
return out
