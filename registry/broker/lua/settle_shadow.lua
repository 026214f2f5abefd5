-- Delete compared pairs, and add their comparisons up. A pair counts once, whoever compared it and how often.
-- KEYS  1 queue, 2 flow of the shadow, 3 report, 4 worst, 5 series
-- ARGV  group, id of the shadow, most worst comparisons, length of the series, then per pair:
--       entry id, bytes, outcome, JSON for the series ('': none), how bad it is, JSON for the worst ('': none),
--       number of figures, then per figure: name, value
-- Returns per pair '1' if it was counted, '0' if another shadow worker had settled it, or if it had expired.
-- The caller bounds the pairs of a call: jobs wait for the server meanwhile.
local is_current = redis.call('HGET', KEYS[3], 'id') == ARGV[2]
local is_running = redis.call('HGET', KEYS[2], 'id') == ARGV[2]
local ids, counted, freed, at = {}, {}, 0, 5
local outcomes, figures, examples = {}, {}, {}

-- Welford's update (1962) of count, mean and sum of squared differences, with the least and the largest value. Each
-- figure is read once and written once: a command for each value would take most of the time.
local function add(name, value)
  local seen = figures[name]
  if not seen then
    seen = {}
    for part in string.gmatch(redis.call('HGET', KEYS[3], 'f:' .. name) or '', '%S+') do
      table.insert(seen, tonumber(part))
    end
    figures[name] = seen
  end
  local n, mean = (seen[1] or 0) + 1, seen[2] or 0
  local delta = value - mean
  mean = mean + delta / n
  seen[1], seen[2], seen[3] = n, mean, (seen[3] or 0) + delta * (value - mean)
  seen[4], seen[5] = math.min(seen[4] or value, value), math.max(seen[5] or value, value)
end

while at <= #ARGV do
  local id, size, outcome, series, badness, example, count = unpack(ARGV, at, at + 6)
  at = at + 7
  local is_first = redis.call('XDEL', KEYS[1], id) == 1
  if is_first then
    freed = freed + tonumber(size)
    if is_current then
      outcomes[outcome] = (outcomes[outcome] or 0) + 1
      for index = at, at + 2 * count - 2, 2 do add(ARGV[index], tonumber(ARGV[index + 1])) end
      if series ~= '' then redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'c', series) end
      if example ~= '' then
        table.insert(examples, badness)
        table.insert(examples, example)
      end
    end
  end
  table.insert(ids, id)
  table.insert(counted, is_first and is_current and '1' or '0')
  at = at + 2 * count
end
-- pcall: the queue may have expired with its group.
if #ids > 0 then redis.pcall('XACK', KEYS[1], ARGV[1], unpack(ids)) end
for outcome, more in pairs(outcomes) do redis.call('HINCRBY', KEYS[3], 'n:' .. outcome, more) end
local fields = {}
for name, seen in pairs(figures) do
  table.insert(fields, 'f:' .. name)
  table.insert(fields, string.format('%.0f %.17g %.17g %.17g %.17g', unpack(seen)))
end
if #fields > 0 then redis.call('HSET', KEYS[3], unpack(fields)) end
if #examples > 0 then
  redis.call('ZADD', KEYS[4], unpack(examples))
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -tonumber(ARGV[3]) - 1)
end
-- This script creates these two keys, which expire with the report.
local expires_ms = redis.call('PTTL', KEYS[3])
if expires_ms > 0 then
  for index = 4, 5 do redis.call('PEXPIRE', KEYS[index], expires_ms) end
end
if freed > 0 and is_running then redis.call('HINCRBY', KEYS[2], 'bytes', -freed) end
return table.concat(counted)
