#!lua flags=allow-oom
-- Record which trajectories a step gets, once: a repeated request for the step gets the same ones.
-- KEYS[1] batch     string: trajectory ids joined by spaces
-- KEYS[2] counters  hash: drawn (the last batch's number), sampled:<source>
-- KEYS[3] batch log  sorted set: step by the number of its batch
-- KEYS[4..] payloads of the batch's trajectories, as it names them
-- ARGV[1] ids joined by spaces; ARGV[2] step; ARGV[3] '' or the number of the last batch that this one takes into
--   account; then pairs source, count
-- Returns the recorded ids, '' when another batch was recorded after ARGV[3], or a trajectory has left the window
--   and Redis since it was drawn.
local known = redis.call('GET', KEYS[1])
if known then return known end
if ARGV[3] ~= '' and (redis.call('HGET', KEYS[2], 'drawn') or '0') ~= ARGV[3] then return '' end
-- As many at once as Lua's stack surely takes; a key that is named twice counts twice.
for first = 4, #KEYS, 1000 do
  local last = math.min(first + 999, #KEYS)
  if redis.call('EXISTS', unpack(KEYS, first, last)) < last - first + 1 then return '' end
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[2], 'drawn', 1), ARGV[2])
for at = 4, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[2], 'sampled:' .. ARGV[at], ARGV[at + 1])
end
return ARGV[1]
