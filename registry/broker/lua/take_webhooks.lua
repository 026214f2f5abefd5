-- Take webhooks that are due. Each is due again after the lease, unless its try is settled before.
-- KEYS  1 waiting, 2 due
-- ARGV  count, lease_ms, prefix of the keys of events
-- Returns per webhook: id, job, state, when the job ended in ms, target, tries, failures. An error that says nothing of
-- the key, such as that of a server without memory, is returned: all webhooks stay.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local out = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local event = ARGV[3] .. id
  -- pcall: a key of another type is no webhook.
  local tries = redis.call('EXISTS', event) == 1 and redis.pcall('HINCRBY', event, 'tries', 1)
  if type(tries) == 'table' and not string.find(tries.err, 'WRONGTYPE', 1, true)
      and not string.find(tries.err, 'not an integer', 1, true)
      and not string.find(tries.err, 'would overflow', 1, true) then
    return tries
  end
  if type(tries) ~= 'number' then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  else
    redis.call('ZADD', KEYS[2], now + ARGV[2], id)
    local fields = redis.call('HMGET', event, 'job', 'state', 'ended', 'target', 'failures')
    table.insert(out, { id, fields[1], fields[2], fields[3], fields[4], tries, fields[5] or '0' })
  end
end
return out
