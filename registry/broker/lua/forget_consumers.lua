-- Delete the consumers of a group that left long ago and hold no entry.
-- KEYS  1 the stream
-- ARGV  group, after how many ms without a call a consumer has left
-- Returns how many were deleted.
local deleted = 0
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local seen = {}
  for field = 1, #info, 2 do seen[info[field]] = info[field + 1] end
  if seen['pending'] == 0 and seen['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], seen['name'])
    deleted = deleted + 1
  end
end
return deleted
