-- Claim up to `credit` jobs, most urgent first. `reserve` of them are kept for the lower band whose head has
-- waited longest, if that is longer than `ageing_ms`, so that no band starves. The jobs stop when `credit_bytes` are
-- reached, or the bytes of one call; one job of the reserve is claimed beyond them.
-- KEYS  1-4 streams by priority, 5 exists while the slot is paused, 6 the active version
-- ARGV  group, consumer, credit, reserve, ageing_ms, credit_bytes, bytes of one call, bytes of the largest possible
--       job, bytes of a job as the worker expects it, how many of the bands to claim from
-- Returns seconds, microseconds, whether the slot is paused 0/1, the active version, then pairs: band 1-4, jobs.
-- A band may have several pairs. The jobs are one list: entry id, sealed, entry id, sealed and so on. An entry that is
-- no new job of ours has all of its fields in place of `sealed`. A table for each entry would cost more than its bytes.
local time = redis.call('TIME')
local out = { time[1], time[2], redis.call('EXISTS', KEYS[5]), redis.call('GET', KEYS[6]) }
if out[3] == 1 then return out end
local credit, reserve, ageing = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local left_bytes, left_call = tonumber(ARGV[6]), tonumber(ARGV[7])
local largest, expected, bands = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

-- The size of a job is known once it is claimed. So no step asks for more jobs than fit the credit if all are the
-- largest, and the call if they are like those of the step before.
local function take(band, count)
  local taken = 0
  while taken < count and left_bytes > 0 and left_call > 0 do
    local most = math.max(1, math.floor(math.min(count - taken, left_bytes / largest, left_call / expected)))
    local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', most, 'STREAMS', KEYS[band], '>')
    if not reply then break end
    local entries, jobs = reply[1][2], {}
    out[#out + 1] = band
    out[#out + 1] = jobs
    expected = 1
    for index, entry in ipairs(entries) do
      local fields = entry[2]
      local sealed = fields[2]
      jobs[index * 2 - 1] = entry[1]
      jobs[index * 2] = #fields == 2 and sealed or fields
      local size = #sealed
      left_bytes, left_call = left_bytes - size, left_call - size
      if size > expected then expected = size end
    end
    taken = taken + #entries
    if #entries < most then break end
  end
  return taken
end

-- When the first job of a band that was never claimed was accepted, in ms.
local function head_ms(band)
  if redis.call('XLEN', KEYS[band]) == 0 then return nil end
  local delivered = '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[band])) do
    local info = {}
    for field = 1, #group, 2 do
      info[group[field]] = group[field + 1]
    end
    if info['name'] == ARGV[1] then delivered = info['last-delivered-id'] end
  end
  local head = redis.call('XRANGE', KEYS[band], '(' .. delivered, '+', 'COUNT', 1)[1]
  return head and tonumber(string.match(head[1], '^%d+'))
end

local left, band = credit - reserve, 0
while left > 0 and left_bytes > 0 and left_call > 0 and band < bands do
  band = band + 1
  left = left - take(band, left)
end
if left > 0 and left_bytes > 0 and left_call > 0 then return out end

left = reserve
local oldest, oldest_ms
local aged_before = time[1] * 1000 + math.floor(time[2] / 1000) - ageing
if left > 0 then
  for lower = band + 1, bands do
    local ms = head_ms(lower)
    if ms and ms <= aged_before and (not oldest or ms < oldest_ms) then oldest, oldest_ms = lower, ms end
  end
  if oldest then
    left_bytes, left_call = math.max(1, left_bytes), math.max(1, left_call)
    left = left - take(oldest, left)
  end
end
for any = math.max(band, 1), bands do
  if left > 0 then left = left - take(any, left) end
end
return out
