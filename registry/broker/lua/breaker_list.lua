-- Read the circuit breakers of a model.
-- KEYS  1 breakers
-- Returns now in ms, then name and record of each.
local out = redis.call('HGETALL', KEYS[1])
table.insert(out, 1, now)
return out
