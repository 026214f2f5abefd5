-- Read a job's record, whether a worker holds the job, and how much of its time is left.
-- KEYS  1-4 streams by priority, 5 record
-- ARGV  group, subscribe 0/1, bytes of one call
-- Returns nil, or record, consumer ('' when waiting or terminal), deliveries, and for a live job the ms until its
-- deadline or the end of its lifetime. Of a record larger than one call: its first piece and its size.
local size = redis.call('STRLEN', KEYS[5])
if size > tonumber(ARGV[3]) then return { redis.call('GETRANGE', KEYS[5], 0, ARGV[3] - 1), size } end
local record = redis.call('GET', KEYS[5])
if not record then return nil end
local flag, priority, entry, expires = string.match(record, '^[QK](.)(%d)([^\n]*)\n.*\n(%d+)$')
if not flag then return { record, '', 0 } end
local time = redis.call('TIME')
local left = expires - (time[1] * 1000 + math.floor(time[2] / 1000))
if ARGV[2] == '1' then redis.call('SETRANGE', KEYS[5], 1, (flag == 'w' or flag == 'b') and 'b' or 's') end
-- Before the first worker there is no group, and XPENDING fails.
local pending = redis.pcall('XPENDING', KEYS[1 + priority], ARGV[1], entry, entry, 1)[1]
if not pending or pending[2] == 'released' then return { record, '', pending and pending[4] or 0, left } end
return { record, pending[2], pending[4], left }
