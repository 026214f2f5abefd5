-- Append events of running jobs. Only a job's holder may. A repeated call appends nothing.
-- KEYS  per job: stream, record
-- ARGV  group, consumer, ttl_ms, most bytes of the events of one job,
--       then per job: entry id, name of the run, sequence number and bytes of the run's previous position (0: none),
--       number of events, first sequence number to keep (0: all), envelope, whether the run continues the events of the
--       one before 0/1
-- Returns per job its new position: sequence number and bytes; two zeros when the consumer does not hold the job.
-- The id of an entry has the sequence number of its last event.
local group, consumer, ttl, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local function append(events, keep, seq, kind, data, bytes)
  local id = seq .. '-0'
  if keep > 0 then
    redis.call('XADD', events, 'MINID', '=', keep .. '-0', id, 't', kind, 'd', data, 'b', bytes)
  else
    redis.call('XADD', events, id, 't', kind, 'd', data, 'b', bytes)
  end
end

local function is_held(stream, record, entry)
  if not redis.pcall('XPENDING', stream, group, entry, entry, 1, consumer)[1] then return false end
  local state = redis.call('GETRANGE', record, 0, 1)
  if state == '' then return false end
  local flag = string.sub(state, 2, 2)
  if flag == '-' or flag == 'w' then redis.call('SETRANGE', record, 1, flag == 'w' and 'b' or 's') end
  return true
end

local function emit(stream, record, a)
  local entry, run, sealed, events = ARGV[a], ARGV[a + 1], ARGV[a + 6], record .. ':events'
  local seq, bytes = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local count, keep = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
  if not is_held(stream, record, entry) then return 0, 0 end
  if seq > 0 then
    -- If the answer to an earlier call was lost, its events are in the stream. Other events are those of another run.
    local next = redis.call('XRANGE', events, (seq + 1) .. '-0', '+', 'COUNT', 1)[1]
    if next and next[2][4] ~= sealed then return 0, 0 end
    if next then return seq + count, bytes + #sealed end
  else
    -- A run begins with an entry that has its name: `started`; after another run `resumed` or `reset`.
    local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 2)
    seq, bytes = 1, 0
    if last[1] then
      seq, bytes = tonumber(string.match(last[1][1], '^%d+')), tonumber(last[1][2][6]) or 0
    end
    if last[2] and last[2][2][4] == run then return seq, bytes end
    seq = seq + 1
    if bytes + #sealed > most then keep = seq end
    append(events, keep, seq, last[1] and (ARGV[a + 7] == '1' and 'resumed' or 'reset') or 'started', run, bytes)
  end
  seq, bytes = seq + count, bytes + #sealed
  append(events, keep, seq, 'events', sealed, bytes)
  redis.call('PEXPIRE', events, ttl)
  return seq, bytes
end

local positions = {}
for job = 1, #KEYS / 2 do
  positions[2 * job - 1], positions[2 * job] = emit(KEYS[2 * job - 1], KEYS[2 * job], 5 + (job - 1) * 8)
end
return positions
