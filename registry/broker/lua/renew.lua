-- Extend the leases that the consumer still holds.
-- KEYS  1-4 streams by priority, then one record per job
-- ARGV  group, consumer, number of jobs, then per job: priority 0-3, entry id
-- Returns one letter per job: 'H' held, 'K' held and its cancellation was requested, 'L' lost.
local group, consumer = ARGV[1], ARGV[2]
local mine, out = {}, {}
for job = 1, tonumber(ARGV[3]) do
  local stream, entry = KEYS[1 + ARGV[2 + job * 2]], ARGV[3 + job * 2]
  if redis.pcall('XPENDING', stream, group, entry, entry, 1, consumer)[1] then
    mine[stream] = mine[stream] or {}
    table.insert(mine[stream], entry)
    out[job] = redis.call('GETRANGE', KEYS[4 + job], 0, 0) == 'K' and 'K' or 'H'
  else
    out[job] = 'L'
  end
end
for stream, entries in pairs(mine) do
  table.insert(entries, 'JUSTID')
  redis.call('XCLAIM', stream, group, consumer, 0, unpack(entries))
end
return table.concat(out)
