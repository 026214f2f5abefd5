-- Count the quality of an ended job for its arm. The record notes that, so that each job counts once.
-- KEYS  1 record, 2 ratings of the experiment
-- ARGV  version, quality, ttl in ms
-- Returns 'C' counted, 'R' rated before, 'U' no result of this job. A version has: count, mean, sum of squared
-- deviations (Welford 1962).
local head = redis.call('GETRANGE', KEYS[1], 0, 1)
if head == '' or string.match(head, '^[QK]') then return 'U' end
if string.sub(head, 2, 2) == '+' then return 'R' end
-- First what may fail: a foreign key of another type than ours is quarantined, and the call is repeated.
local sums = redis.call('HGET', KEYS[2], ARGV[1])
local count, mean, m2 = string.match(sums or '', '^(%d+) (%S+) (%S+)$')
count, mean, m2 = (count or 0) + 1, tonumber(mean or 0), tonumber(m2 or 0)
local delta = ARGV[2] - mean
mean = mean + delta / count
m2 = m2 + delta * (ARGV[2] - mean)
redis.call('HSET', KEYS[2], ARGV[1], string.format('%d %.17g %.17g', count, mean, m2))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SETRANGE', KEYS[1], 1, '+')
return 'C'
