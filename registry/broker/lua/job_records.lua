-- Read records of jobs, as far as they fit into one call.
-- KEYS  the records
-- ARGV  bytes of one call
-- Returns per record: nil when it is missing, its bytes, or its size: then another call must read it.
local left, out = tonumber(ARGV[1]), {}
for index, key in ipairs(KEYS) do
  -- pcall: a key of another type is no record.
  local size = redis.pcall('STRLEN', key)
  if type(size) ~= 'number' then
    out[index] = false
  elseif size > left then
    out[index] = size
  else
    left = left - size
    out[index] = redis.call('GET', key)
  end
end
return out
