#!lua flags=allow-oom
-- Note how many trajectories of groups without contrast a run has had, before some of them leave Redis.
-- KEYS[1] counters  hash: equal_to (the insertion number up to which they are counted), equal (how many)
-- ARGV[1] equal_to, ARGV[2] equal
-- Returns 1 when it was noted, 0 when the run is deleted or another has counted as far.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'equal_to') or 0) >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'equal_to', ARGV[1], 'equal', ARGV[2])
return 1
