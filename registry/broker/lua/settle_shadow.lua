-- Delete compared pairs, and add their comparisons up. A pair counts once, whoever compared it and how often.
-- KEYS  1 queue, 2 flow of the shadow, 3 report, 4 worst, 5 series
-- ARGV  group, id of the shadow, most worst comparisons, length of the series, then per pair:
--       entry id, bytes, outcome, JSON for the series ('': none), how bad it is, JSON for the worst ('': none),
--       number of figures, then per figure: name, value
-- Returns per pair '1' if it was counted, '0' if another shadow worker had settled it, or if it had expired.
local is_current = redis.call('HGET', KEYS[3], 'id') == ARGV[2]
local counted, freed, at = {}, 0, 5

-- Welford's update (1962) of count, mean and sum of squared differences, with the least and the largest value.
local function add(name, value)
  local field = 'f:' .. name
  local seen = {}
  for part in string.gmatch(redis.call('HGET', KEYS[3], field) or '', '%S+') do table.insert(seen, tonumber(part)) end
  local n, mean, m2 = (seen[1] or 0) + 1, seen[2] or 0, seen[3] or 0
  local delta = value - mean
  mean = mean + delta / n
  m2 = m2 + delta * (value - mean)
  local least, largest = math.min(seen[4] or value, value), math.max(seen[5] or value, value)
  redis.call('HSET', KEYS[3], field, string.format('%.0f %.17g %.17g %.17g %.17g', n, mean, m2, least, largest))
end

while at <= #ARGV do
  local id, size, outcome, series, badness, example = unpack(ARGV, at, at + 5)
  local figures = tonumber(ARGV[at + 6])
  at = at + 7
  -- pcall: the queue may have expired with its group.
  redis.pcall('XACK', KEYS[1], ARGV[1], id)
  local is_first = redis.call('XDEL', KEYS[1], id) == 1
  if is_first then
    freed = freed + tonumber(size)
    if is_current then
      redis.call('HINCRBY', KEYS[3], 'n:' .. outcome, 1)
      for index = at, at + 2 * figures - 2, 2 do add(ARGV[index], tonumber(ARGV[index + 1])) end
      if series ~= '' then redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'c', series) end
      if example ~= '' then
        redis.call('ZADD', KEYS[4], badness, example)
        redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -tonumber(ARGV[3]) - 1)
      end
    end
  end
  table.insert(counted, is_first and is_current and '1' or '0')
  at = at + 2 * figures
end
if freed > 0 and redis.call('HGET', KEYS[2], 'id') == ARGV[2] then redis.call('HINCRBY', KEYS[2], 'bytes', -freed) end
return table.concat(counted)
