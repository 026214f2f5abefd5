-- Read entries that no worker holds, oldest first: released ones, then those that were never claimed.
-- KEYS  1 stream
-- ARGV  group, after this entry, count, bytes of each job to return
-- Returns per entry: its id, its first bytes, when its job was first accepted in ms ('' if that was with this entry).
local stream, group, after, count, bytes = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local out = {}

local function show(entry)
  local fields = entry[2]
  -- A dead letter that was replayed has the time of its acceptance behind its bytes.
  local is_replayed = #fields == 4 and fields[3] == 'a' and string.match(fields[4], '^%d+$')
  local sealed = (#fields == 2 or is_replayed) and fields[2] or table.concat(fields)
  table.insert(out, { entry[1], string.sub(sealed, 1, bytes), is_replayed and fields[4] or '' })
end

local function later(one, other)
  local ms, n = string.match(one, '^(%d+)-(%d+)$')
  local other_ms, other_n = string.match(other, '^(%d+)-(%d+)$')
  if ms == other_ms then return tonumber(n) > tonumber(other_n) and one or other end
  return tonumber(ms) > tonumber(other_ms) and one or other
end

local delivered = '0-0'
for _, each in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
  local info = {}
  for field = 1, #each, 2 do info[each[field]] = each[field + 1] end
  if info['name'] == group then delivered = info['last-delivered-id'] end
end
if delivered ~= '0-0' then
  for _, pending in ipairs(redis.call('XPENDING', stream, group, '(' .. after, '+', count, 'released')) do
    local entry = redis.call('XRANGE', stream, pending[1], pending[1])[1]
    if entry then show(entry) end
  end
end
if #out < count then
  local left = redis.call('XRANGE', stream, '(' .. later(after, delivered), '+', 'COUNT', count - #out)
  for _, entry in ipairs(left) do show(entry) end
end
return out
