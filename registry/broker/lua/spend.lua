-- Admit requests within their limits, in order. A request is admitted if every one of its meters has room; then all
-- of them are charged. A refused request charges none.
-- KEYS  per request: one meter each, and the bits of its batch if it is one of lines; a meter may stand there several
--       times
-- ARGV  number of requests, then per request: number of its meters, number of its lines, then per meter: kind, limit,
--       cost, second of the charge that it replaces or 0, then the numbers of the lines.
--       The kinds are 'm' a sliding minute, 'd' a day and 'M' a month of UTC. The cost 0 asks for room for 1.
-- A replaced charge is one of 1. It is taken back first, also if the request is then refused.
-- A request of lines that were charged before is admitted, and charged nothing: a call may be repeated.
-- Returns per request: 1 admitted or 0 refused, then per meter: what is left, seconds until there is more, the second
-- that a charge counts at.
-- A sliding minute counts by seconds: a request leaves it between 60 and 61 s after it came, so that no 60 s have more
-- than the limit.
local time = redis.call('TIME')
local now = tonumber(time[1])
local MINUTE_TTL_MS, DAY_TTL_MS, MONTH_TTL_MS = 62000, 90000000, 2764800000
-- Longer than a batch may run: 7 days.
local LINES_TTL_MS = 691200000

-- (spent, seconds until the oldest request leaves, the second to charge); deletes the seconds that have left.
local function minute(key)
  local seen = redis.call('HMGET', key, 'first', 'sum')
  local first, sum, at = tonumber(seen[1] or ''), tonumber(seen[2] or '') or 0, now
  -- A clock that went back a little stands still until it is there again.
  if first and first > now and first - now < 120 then at = first end
  if not first or first > at or at - first > 120 then
    if first then redis.call('PEXPIRE', key, 0) end
    return 0, 61, at
  end
  local begin = first
  while first < at do
    local spent = redis.call('HGET', key, first)
    if spent and first > at - 61 then break end
    if spent then
      sum = sum - spent
      redis.call('HDEL', key, first)
    end
    first = first + 1
  end
  if first ~= begin then redis.call('HSET', key, 'first', first, 'sum', sum) end
  return sum, first + 61 - at, at
end

local function whole(key, kind)
  local name, left = period(now, kind)
  local seen = redis.call('HMGET', key, 'period', 'sum')
  return seen[1] == name and tonumber(seen[2] or '') or 0, left, name
end

-- A charge that has left its window is no part of the sum any more.
local function take_back(key, kind, second)
  if kind == 'm' then
    local spent = tonumber(redis.call('HGET', key, second) or '') or 0
    if spent < 1 then return end
    if spent == 1 then redis.call('HDEL', key, second) else redis.call('HINCRBY', key, second, -1) end
  elseif redis.call('HGET', key, 'period') ~= period(second, kind) then
    return
  end
  redis.call('HINCRBY', key, 'sum', -1)
end

-- place: the second of a minute, or the name of a day or month.
local function charge(key, kind, cost, place)
  if kind == 'm' then
    redis.call('HSETNX', key, 'first', place)
    redis.call('HINCRBY', key, place, cost)
    redis.call('HINCRBY', key, 'sum', cost)
    redis.call('PEXPIRE', key, MINUTE_TTL_MS)
  else
    if redis.call('HGET', key, 'period') ~= place then redis.call('HSET', key, 'period', place, 'sum', 0) end
    redis.call('HINCRBY', key, 'sum', cost)
    redis.call('PEXPIRE', key, kind == 'd' and DAY_TTL_MS or MONTH_TTL_MS)
  end
end

local function are_charged(bits, first, last)
  for a = first, last do
    if redis.call('GETBIT', bits, ARGV[a]) == 0 then return false end
  end
  return true
end

local out, at, meter = {}, 1, 0
for _ = 1, tonumber(ARGV[1]) do
  local meters, lines = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local first_line, bits = at + 3 + meters * 4, KEYS[meter + meters + 1]
  local last_line = first_line + lines - 1
  local answer, places = { 1 }, {}
  for index = 1, meters do
    local a = at + 2 + (index - 1) * 4
    local kind, limit, cost, replaced = ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
    if replaced > 0 then take_back(KEYS[meter + index], kind, replaced) end
    local spent, reset, place = (kind == 'm' and minute or whole)(KEYS[meter + index], kind)
    places[index] = place
    if spent + math.max(cost, 1) > limit then answer[1] = 0 end
    answer[#answer + 1] = math.max(0, limit - spent)
    answer[#answer + 1] = reset
    answer[#answer + 1] = kind == 'm' and place or now
  end
  if lines > 0 and are_charged(bits, first_line, last_line) then
    answer[1] = 1
  elseif answer[1] == 1 then
    for a = first_line, last_line do redis.call('SETBIT', bits, ARGV[a], 1) end
    if lines > 0 then redis.call('PEXPIRE', bits, LINES_TTL_MS) end
    for index = 1, meters do
      local a = at + 2 + (index - 1) * 4
      local cost = tonumber(ARGV[a + 3])
      if cost > 0 then
        charge(KEYS[meter + index], ARGV[a + 1], cost, places[index])
        answer[index * 3 - 1] = answer[index * 3 - 1] - cost
      end
    end
  end
  out[#out + 1] = answer
  at, meter = last_line, meter + meters + (lines > 0 and 1 or 0)
end
return out
