-- Withdraw jobs that no worker holds: purged ones, and those whose time has passed. Jobs that a worker claimed
-- meanwhile continue.
-- KEYS  1 flow, 2 stream, then one record per job
-- ARGV  group, priority 0-3, result_ttl_ms, reply_ttl_ms, reply cap, prefix of idempotency keys, number of jobs,
--       then per job: entry id, local id, tenant ('' when the bytes are no job), result record
-- Returns one letter per job: 'W' withdrawn, 'R' removed, without a record to end, 'H' held, 'G' gone.
local flow, stream, group = KEYS[1], KEYS[2], ARGV[1]
local out = {}
for job = 1, tonumber(ARGV[7]) do
  local a = 8 + (job - 1) * 4
  local entry, id, tenant, key = ARGV[a], ARGV[a + 1], ARGV[a + 2], KEYS[2 + job]
  -- Before anything is written: GET refuses a foreign key, of another type than ours.
  local record = redis.call('GET', key)
  -- Before the first worker there is no group, and XPENDING fails.
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)[1]
  if pending and pending[2] ~= 'released' then
    out[job] = 'H'
  elseif redis.call('XDEL', stream, entry) == 0 then
    out[job] = 'G'
  else
    if pending then redis.call('XACK', stream, group, entry) end
    local state, _, priority, accepted = parts(record)
    if state and accepted == entry and priority == ARGV[2] then
      finish(flow, key, record, { record = ARGV[a + 3], id = id, ttl = ARGV[3], reply_ttl = ARGV[4], cap = ARGV[5],
        idempotency_prefix = ARGV[6] })
      out[job] = 'W'
    else
      -- The record has expired, but the job still counts as in flight.
      if tenant ~= '' and not record and redis.call('HINCRBY', flow, 't:' .. tenant, -1) <= 0 then
        redis.call('HDEL', flow, 't:' .. tenant)
      end
      out[job] = 'R'
    end
  end
end
return table.concat(out)
