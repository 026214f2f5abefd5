-- Describe dead letters, oldest first, without their bytes.
-- KEYS  1 dead letters
-- ARGV  after this entry, count
-- Returns per letter: entry, its size, then its other fields as name, value pairs. The answer is shorter when letters
-- are large. Only an empty answer means that there are no more.
local LOOKED_AT_BYTES = 16777216
local out, after, seen = {}, ARGV[1], 0
for _ = 1, tonumber(ARGV[2]) do
  local letter = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 1)[1]
  if not letter or seen > LOOKED_AT_BYTES then break end
  local fields, size = {}, 0
  for field = 1, #letter[2], 2 do
    if letter[2][field] == 'e' then
      size = #letter[2][field + 1]
    else
      table.insert(fields, letter[2][field])
      table.insert(fields, letter[2][field + 1])
    end
  end
  after, seen = letter[1], seen + size
  table.insert(out, { after, size, fields })
end
return out
