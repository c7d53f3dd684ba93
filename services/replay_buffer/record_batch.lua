-- Fix which trajectories a step gets, once: a repeated request for the step finds the first answer.
-- KEYS[1] batch     string: trajectory ids joined by spaces
-- KEYS[2] counters  hash: sampled:<source>
-- ARGV[1] ids joined by spaces; ARGV[2] seconds to remember; then pairs source, count
-- Returns the ids that hold.
local known = redis.call('GET', KEYS[1])
if known then return known end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
for at = 3, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[2], 'sampled:' .. ARGV[at], ARGV[at + 1])
end
return ARGV[1]
