-- The probe of a half-open breaker passed: the breaker is closed. A probe that another one has replaced does nothing.
-- KEYS  1 breakers
-- ARGV  name, probe
-- Returns whether this probe closed it, and the record.
local name, probe = ARGV[1], ARGV[2]
local state = read(KEYS[1], name)
if state.probe ~= probe or state.circuit == 'open' then return answer(false, state) end
if state.circuit == 'closed' then return answer(true, state) end
state.circuit, state.failures = 'closed', '-'
return write(KEYS[1], name, state, true)
