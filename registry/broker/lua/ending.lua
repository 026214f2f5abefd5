-- The beginning of each script that ends a single job; see SOURCES in redis_scripts.py.
-- parts returns the parts of a live record: state, flag, priority, entry id, tenant, reply, digest of the idempotency
-- key, when its time ends in ms; nil for any other record. The flag is '-' for none, 's' for subscribers, 'w' for a
-- webhook, 'b' for both. The record of a job with a webhook has a line with its target before the last line.
local function parts(record)
  return string.match(record or '', '^([QK])(.)(%d)([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n[^\n]-\n?(%d+)$')
end

-- Turn a live record into a result, and tell its client and its subscribers.
local function finish(flow, key, live, ended)
  local _, flag, _, _, tenant, reply, digest = parts(live)
  redis.call('SET', key, ended.record, 'PX', ended.ttl)
  if redis.call('HINCRBY', flow, 't:' .. tenant, -1) <= 0 then redis.call('HDEL', flow, 't:' .. tenant) end
  if digest ~= '' then redis.call('PEXPIRE', ended.idempotency_prefix .. digest, ended.ttl) end
  if flag == 's' or flag == 'b' then
    local events = key .. ':events'
    local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
    local seq = last and tonumber(string.match(last[1], '^%d+')) + 1 or 3
    redis.call('XADD', events, seq .. '-0', 't', string.sub(ended.record, 1, 1), 'd', '')
    redis.call('PEXPIRE', events, ended.ttl)
  end
  if flag == 'w' or flag == 'b' then queue_webhook(key, live, string.sub(ended.record, 1, 1)) end
  if string.match(reply, ':lane$') then
    redis.pcall('XADD', reply, '*', ended.id, ended.record)
  elseif reply ~= '' then
    local told = redis.pcall('XADD', reply, 'MAXLEN', '~', ended.cap, '*', ended.id, ended.record)
    if type(told) ~= 'table' then redis.call('PEXPIRE', reply, ended.reply_ttl) end
  end
end
