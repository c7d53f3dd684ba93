#!lua flags=allow-oom
-- Remove a run from the set of those with unarchived trajectories, unless some were inserted meanwhile.
-- KEYS[1] counters  hash: number (last insertion)
-- KEYS[2] stored    hash: written (last insertion number stored)
-- KEYS[3] unstored  set: run ids
-- ARGV[1] run id
-- Returns 1 when everything is stored.
if tonumber(redis.call('HGET', KEYS[1], 'number') or 0) > tonumber(redis.call('HGET', KEYS[2], 'written') or 0) then
  return 0
end
redis.call('SREM', KEYS[3], ARGV[1])
return 1
