-- The beginning of each script that ends jobs; see SOURCES in redis_scripts.py.
-- Queue the webhook of a job that has ended, due now. `live` is the record that the job had. Its last line but one is
-- the target of the webhook. pcall: a key of another type costs the webhook, not the result.
local function queue_webhook(key, live, state)
  local slot, id = string.match(key, '^([^:]*):job:(.*)$')
  local time = redis.call('TIME')
  local at = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  local event, prefix = 'evt_' .. id .. '_' .. at, slot .. ':webhooks:'
  redis.pcall('HSET', prefix .. 'event:' .. event, 'job', id, 'state', state, 'ended', at, 'tries', 0,
    'target', string.match(live, '\n([^\n]*)\n%d+$'))
  redis.pcall('ZADD', prefix .. 'waiting', at, event)
  redis.pcall('ZADD', prefix .. 'due', at, event)
end

