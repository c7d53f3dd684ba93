#!lua flags=allow-oom
-- Move trajectories that memory holds from the set of their source to that of memory: they outlive the window.
-- KEYS[1] facts   hash: trajectory id -> what sampling must know
-- KEYS[2] source  sorted set: trajectory id by insertion number
-- KEYS[3] memory  sorted set: trajectory id by insertion number
-- ARGV per trajectory: id, insertion number
-- Returns how many moved.
local moved = 0
for at = 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[at]) == 1 and redis.call('ZREM', KEYS[2], ARGV[at]) == 1 then
    redis.call('ZADD', KEYS[3], ARGV[at + 1], ARGV[at])
    moved = moved + 1
  end
end
return moved
