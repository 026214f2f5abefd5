-- Withdraw a waiting job; of a running one, ask its worker to stop.
-- KEYS  1 flow, 2-5 streams by priority, 6 record
-- ARGV  group, tenant, result record, local id, result_ttl_ms, reply_ttl_ms, reply cap, prefix of idempotency keys
-- Returns 'C' cancelled, 'R' requested, 'S' settled, 'U' unknown.
local record = redis.call('GET', KEYS[6])
if not record then return 'U' end
local state, flag, priority, entry, tenant, reply, once =
  string.match(record, '^([QK])(.)(%d)([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
if not state then return 'S' end
if tenant ~= ARGV[2] then return 'U' end
local stream = KEYS[2 + priority]
-- Without a worker there is no group yet, and XPENDING answers with an error.
local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)[1]
if pending and pending[2] ~= 'released' then
  redis.call('SETRANGE', KEYS[6], 0, 'K')
  return 'R'
end
if pending then redis.call('XACK', stream, ARGV[1], entry) end
redis.call('XDEL', stream, entry)
redis.call('SET', KEYS[6], ARGV[3], 'PX', ARGV[5])
if redis.call('HINCRBY', KEYS[1], 't:' .. tenant, -1) <= 0 then redis.call('HDEL', KEYS[1], 't:' .. tenant) end
if once ~= '' then redis.call('PEXPIRE', ARGV[8] .. once, ARGV[5]) end
if flag == 's' then
  local events = KEYS[6] .. ':events'
  local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
  local seq = last and tonumber(string.match(last[1], '^%d+')) + 1 or 3
  redis.call('XADD', events, seq .. '-0', 't', 'X', 'd', '')
  redis.call('PEXPIRE', events, ARGV[5])
end
if reply ~= '' then
  local cap = string.match(reply, ':lane$') and '0' or ARGV[7]
  if cap == '0' then
    redis.call('XADD', reply, '*', ARGV[4], ARGV[3])
  else
    redis.call('XADD', reply, 'MAXLEN', '~', cap, '*', ARGV[4], ARGV[3])
    redis.call('PEXPIRE', reply, ARGV[6])
  end
end
return 'C'
