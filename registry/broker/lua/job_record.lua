-- Read a job's record, and whether a worker holds the job.
-- KEYS  1-4 streams by priority, 5 record
-- ARGV  group, subscribe 0/1
-- Returns nil, or record, consumer ('' when waiting or terminal), deliveries.
local record = redis.call('GET', KEYS[5])
if not record then return nil end
local priority, entry = string.match(record, '^[QK].(%d)([^\n]*)\n')
if not priority then return { record, '', 0 } end
if ARGV[2] == '1' then redis.call('SETRANGE', KEYS[5], 1, 's') end
-- Before the first worker there is no group, and XPENDING fails.
local pending = redis.pcall('XPENDING', KEYS[1 + priority], ARGV[1], entry, entry, 1)[1]
if not pending or pending[2] == 'released' then return { record, '', pending and pending[4] or 0 } end
return { record, pending[2], pending[4] }
