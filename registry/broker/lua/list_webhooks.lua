-- Read webhooks that wait, or dead ones, oldest first.
-- KEYS  1 waiting or dead, 2 due
-- ARGV  how many to leave out, count, prefix of the keys of events
-- Returns per webhook: id, job, state, when the job ended in ms, target, tries, failures, error, when it is due in ms or ''.
local out = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[1] + ARGV[2] - 1)) do
  local fields = redis.pcall('HMGET', ARGV[3] .. id, 'job', 'state', 'ended', 'target', 'tries', 'error', 'failures')
  if fields[1] then
    local due = redis.call('ZSCORE', KEYS[2], id)
    table.insert(out, { id, fields[1], fields[2], fields[3], fields[4], fields[5], fields[7] or '0', fields[6] or '', due or '' })
  end
end
return out
