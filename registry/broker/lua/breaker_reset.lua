-- Close a breaker, whatever its state.
-- KEYS  1 breakers
-- ARGV  name
-- Returns whether it was not closed, and the record.
local name = ARGV[1]
local state = read(KEYS[1], name)
local was_closed = state.circuit == 'closed'
if was_closed and state.failures == '-' then return answer(false, state) end
state.circuit, state.probe, state.failures = 'closed', '-', '-'
return write(KEYS[1], name, state, not was_closed)
