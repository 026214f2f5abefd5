-- Open a breaker, whatever its state: drift was found, a gate refused, an operator said so. An open one pauses anew.
-- KEYS  1 breakers
-- ARGV  name, id, reason, open_ms
-- Returns whether it was not open before, and the record.
local name, id = ARGV[1], ARGV[2]
local state = read(KEYS[1], name)
if state.circuit == 'open' then
  local repeated = state.by == id
  state.retry, state.reason, state.failures = now + ARGV[4], ARGV[3], '-'
  return write(KEYS[1], name, state, repeated)
end
open(state, id, ARGV[3], ARGV[4])
return write(KEYS[1], name, state, true)
