-- Put a dead letter back into its queue with its job id, as if it had been accepted now.
-- KEYS  1 flow, 2 dead letters, 3 stream, 4 record, 5 idempotency key, when the job has one
-- ARGV  the letter's entry, priority 0-3, local id, tenant, reply, digest of the idempotency key ('' without),
--       ttl of the record in ms, whether the deadline counts from the first acceptance 0/1, lifetime in ms,
--       target of the webhook ('' without)
-- Returns 'R' replayed, 'N' no such letter, 'L' the job is in the queue, 'S' it has ended in another way,
--         'K' its idempotency key belongs to another job now.
local dead, stream, key = KEYS[2], KEYS[3], KEYS[4]
local priority, id, tenant, digest, ttl = ARGV[2], ARGV[3], ARGV[4], ARGV[6], ARGV[7]
local record = redis.call('GET', key)
local state, _, band, entry = parts(record)

local letter = redis.call('XRANGE', dead, ARGV[1], ARGV[1])[1]
-- If the answer to an earlier call was lost, the job is in the queue.
if not letter then return state and 'R' or 'N' end
local kept = {}
for field = 1, #letter[2], 2 do kept[letter[2][field]] = letter[2][field + 1] end
local sealed = kept['e'] or ''

-- Bytes that could not be opened have left a live record whose entry is this letter.
local is_orphan = state and entry == kept['entry'] and band == priority
  and #redis.call('XRANGE', stream, entry, entry) == 0
if state and not is_orphan then return 'L' end
if record and not state and string.sub(record, 1, 1) ~= 'D' then return 'S' end
local first = digest ~= '' and redis.call('GET', KEYS[5])
if first and string.match(first, '\n(.*)$') ~= id then return 'K' end

local accepted, accepted_ms = { 'e', sealed }
if ARGV[8] == '1' and string.match(kept['accepted'] or '', '^%d+$') then
  table.insert(accepted, 'a')
  table.insert(accepted, kept['accepted'])
  accepted_ms = kept['accepted']
end
-- First what refuses a foreign key, of another type than ours, so that nothing is done by halves.
redis.call('XLEN', key .. ':events')
redis.call('XLEN', stream)
if not is_orphan then redis.call('HINCRBY', KEYS[1], 't:' .. tenant, 1) end
redis.call('HINCRBY', KEYS[1], 'dead', -#sealed)
entry = redis.call('XADD', stream, '*', unpack(accepted))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expires = string.format('%.0f', (accepted_ms or now) + ARGV[9])
local flag, target = '-', ''
if ARGV[10] ~= '' then
  flag, target = 'w', ARGV[10] .. '\n'
end
local head = 'Q' .. flag .. priority .. entry .. '\n' .. tenant .. '\n' .. ARGV[5] .. '\n' .. digest .. '\n'
  .. target .. expires
redis.call('SET', key, head, 'PX', ttl)
-- Delete the events of the earlier attempts, the terminal one included.
redis.call('DEL', key .. ':events')
if first then redis.call('PEXPIRE', KEYS[5], ttl) end
redis.call('XDEL', dead, ARGV[1])
return 'R'
