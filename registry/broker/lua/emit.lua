-- Append events of a running job. Only its holder may. A repeated call appends nothing.
-- KEYS  1 stream, 2 record
-- ARGV  group, consumer, entry id, sequence number of the attempt's previous event (0: none), ttl_ms, cap,
--       then pairs: type, sealed
-- Returns the sequence number of the last event, 0 when the consumer does not hold the job.
local stream, record, events = KEYS[1], KEYS[2], KEYS[2] .. ':events'
local consumer, after, ttl, cap = ARGV[2], tonumber(ARGV[4]), ARGV[5], ARGV[6]
if not redis.pcall('XPENDING', stream, ARGV[1], ARGV[3], ARGV[3], 1, consumer)[1] then return 0 end
local state = redis.call('GETRANGE', record, 0, 1)
if state == '' then return 0 end
if string.sub(state, 2, 2) ~= 's' then redis.call('SETRANGE', record, 1, 's') end

local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
local seq = last and tonumber(string.match(last[1], '^%d+')) or 1
local function append(kind, sealed)
  seq = seq + 1
  redis.call('XADD', events, 'MAXLEN', '~', cap, seq .. '-0', 't', kind, 'd', sealed)
end

if after > 0 then
  -- If the answer to an earlier call was lost, its events are in the stream.
  if seq ~= after then return seq end
else
  -- An attempt begins with an entry that names its consumer: `started`, or `reset` after another attempt.
  local begin = seq - (#ARGV - 6) / 2
  local first = begin > 1 and redis.call('XRANGE', events, begin .. '-0', begin .. '-0')[1]
  if first and first[2][4] == consumer .. ' ' .. ARGV[3] then return seq end
  append(last and 'reset' or 'started', consumer .. ' ' .. ARGV[3])
end
for a = 7, #ARGV, 2 do append(ARGV[a], ARGV[a + 1]) end
redis.call('PEXPIRE', events, ttl)
return seq
