-- Delete dead letters.
-- KEYS  1 flow, 2 dead letters
-- ARGV  entries
-- Returns how many of them existed.
local deleted = 0
for _, entry in ipairs(ARGV) do
  local letter = redis.call('XRANGE', KEYS[2], entry, entry)[1]
  if letter then
    local bytes = 0
    for field = 1, #letter[2], 2 do
      if letter[2][field] == 'e' then bytes = #letter[2][field + 1] end
    end
    redis.call('XDEL', KEYS[2], entry)
    redis.call('HINCRBY', KEYS[1], 'dead', -bytes)
    deleted = deleted + 1
  end
end
return deleted
