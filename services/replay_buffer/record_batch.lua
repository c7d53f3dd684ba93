-- Fix which trajectories a step gets, once: a repeated request for the step finds the first answer.
-- KEYS[1] batch     string: trajectory ids joined by spaces
-- KEYS[2] counters  hash: drawn (the last draw's number), sampled:<source>
-- KEYS[3] draws     sorted set: step by the number of its draw
-- KEYS[4..]         per trajectory of the batch a string: the steps that got it, 4 bytes each
-- ARGV[1] ids joined by spaces; ARGV[2] step; ARGV[3] the step's 4 bytes; ARGV[4] how many of the first keys may be
--   drawn ARGV[5] times at most; then pairs source, count
-- Returns the ids that hold, '' when one of them was meanwhile drawn too often.
local known = redis.call('GET', KEYS[1])
if known then return known end
for at = 4, 3 + tonumber(ARGV[4]) do
  if redis.call('STRLEN', KEYS[at]) >= 4 * tonumber(ARGV[5]) then return '' end
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[2], 'drawn', 1), ARGV[2])
for at = 4, #KEYS do redis.call('APPEND', KEYS[at], ARGV[3]) end
for at = 6, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[2], 'sampled:' .. ARGV[at], ARGV[at + 1])
end
return ARGV[1]
