-- Ask for the one probe of a breaker whose pause is over, or whose last probe did not tell its outcome within its lease.
-- KEYS  1 breakers
-- ARGV  name, id of the probe, probe_ms
-- Returns whether the probe is granted, and the record. A repeated call is granted again.
local name, probe = ARGV[1], ARGV[2]
local state = read(KEYS[1], name)
if state.circuit == 'half-open' and state.probe == probe then return answer(true, state) end
if state.circuit == 'closed' or now < (state.circuit == 'open' and state.retry or state.probing) then
  return answer(false, state)
end
state.circuit, state.probe, state.probing = 'half-open', probe, now + ARGV[3]
return write(KEYS[1], name, state, true)
