-- The beginning of each script that ends a single job; see SOURCES in redis_scripts.py.
-- parts returns the parts of a live record: state, flag, priority, entry id, tenant, reply, digest of the idempotency
-- key, when its time ends in ms; nil for any other record. The flag is '-' for none, 's' for subscribers, 'w' for a
-- webhook, 'b' for both. The record of a job with a webhook has a line with its target before the last line.
local function parts(record)
  return string.match(record or '', '^([QK])(.)(%d)([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n[^\n]-\n?(%d+)$')
end

-- Turn a live record into a result, and tell its client and its subscribers.
-- A repeated call finds the job ended. So what may fail behind the first write is called by pcall: a foreign key costs
-- what it holds, and nothing else.
local function finish(flow, key, live, ended)
  local _, flag, _, _, tenant, reply, digest = parts(live)
  redis.call('SET', key, ended.record, 'PX', ended.ttl)
  if flag == 'w' or flag == 'b' then queue_webhook(key, live, string.sub(ended.record, 1, 1)) end
  local in_flight = redis.pcall('HINCRBY', flow, 't:' .. tenant, -1)
  if type(in_flight) == 'number' and in_flight <= 0 then redis.call('HDEL', flow, 't:' .. tenant) end
  if digest ~= '' then redis.call('PEXPIRE', ended.idempotency_prefix .. digest, ended.ttl) end
  if flag == 's' or flag == 'b' then
    local events = key .. ':events'
    local found = redis.pcall('XREVRANGE', events, '+', '-', 'COUNT', 1)
    if not found.err then
      local seq = found[1] and tonumber(string.match(found[1][1], '^%d+')) + 1 or 3
      redis.call('XADD', events, seq .. '-0', 't', string.sub(ended.record, 1, 1), 'd', '')
      redis.call('PEXPIRE', events, ended.ttl)
    end
  end
  if string.match(reply, ':lane$') then
    redis.pcall('XADD', reply, '*', ended.id, ended.record)
  elseif reply ~= '' then
    local told = redis.pcall('XADD', reply, 'MAXLEN', '~', ended.cap, '*', ended.id, ended.record)
    if type(told) ~= 'table' then redis.call('PEXPIRE', reply, ended.reply_ttl) end
  end
end
