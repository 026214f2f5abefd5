-- Note a failure of an optimisation. So many within the window open a closed breaker; a failed probe opens it again.
-- KEYS  1 breakers
-- ARGV  name, id of the failure, reason, probe or '-', failures that open it, window_ms, open_ms
-- Returns whether this failure opened it, and the record.
local name, id, probe = ARGV[1], ARGV[2], ARGV[4]
local state = read(KEYS[1], name)
if state.circuit == 'half-open' and probe ~= '-' and probe == state.probe then
  open(state, id, ARGV[3], ARGV[7])
  return write(KEYS[1], name, state, true)
end
-- Open: the failure is known, or it began before. This very failure may have opened it, and its answer was lost.
if state.circuit ~= 'closed' then return answer(state.circuit == 'open' and state.by == id, state) end
local kept = {}
for at, each in string.gmatch(state.failures, '(%d+):([^,]+)') do
  if each == id then return answer(false, state) end
  if tonumber(at) > now - ARGV[6] then kept[#kept + 1] = at .. ':' .. each end
end
kept[#kept + 1] = ms(now) .. ':' .. id
if #kept >= tonumber(ARGV[5]) then
  open(state, id, ARGV[3], ARGV[7])
  return write(KEYS[1], name, state, true)
end
state.failures = table.concat(kept, ',')
return write(KEYS[1], name, state, false)
