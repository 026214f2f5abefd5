-- The beginning of each script of circuit breakers; see SOURCES in redis_scripts.py.
-- A record is one line: circuit, epoch, opened_ms, retry_ms, probe_until_ms, opened_by, probe, failures, reason.
-- '-' stands for an empty word. Failures are `ms:id`, with commas between them. The reason is the rest of the line.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function ms(number) return string.format('%.0f', number) end

local function read(key, name)
  local line = redis.call('HGET', key, name)
  if not line then
    return { circuit = 'closed', epoch = 0, opened = 0, retry = 0, probing = 0, by = '-', probe = '-',
      failures = '-', reason = '' }
  end
  local circuit, epoch, opened, retry, probing, by, probe, failures, reason =
    string.match(line, '^([a-z-]+) (%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (%S+) (.*)$')
  if circuit ~= 'closed' and circuit ~= 'open' and circuit ~= 'half-open' then
    -- Another program wrote it. Nothing is known of the optimisation, so it may not serve.
    return { circuit = 'open', epoch = 1, opened = now, retry = now, probing = 0, by = '-', probe = '-',
      failures = '-', reason = 'its record could not be read' }
  end
  return { circuit = circuit, epoch = tonumber(epoch), opened = tonumber(opened), retry = tonumber(retry),
    probing = tonumber(probing), by = by, probe = probe, failures = failures, reason = reason }
end

local function line_of(state)
  return table.concat({ state.circuit, ms(state.epoch), ms(state.opened), ms(state.retry), ms(state.probing),
    state.by, state.probe, state.failures, state.reason }, ' ')
end

-- The answer of every script but breaker_list: whether the call did what its name says, and the record.
local function answer(did, state) return { did and 1 or 0, line_of(state) } end

local function write(key, name, state, did)
  redis.call('HSET', key, name, line_of(state))
  return answer(did, state)
end

local function open(state, id, reason, pause)
  state.circuit, state.epoch, state.opened, state.retry = 'open', state.epoch + 1, now, now + pause
  state.by, state.reason, state.failures = id, reason, '-'
end

