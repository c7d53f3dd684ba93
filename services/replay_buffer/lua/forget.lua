#!lua flags=allow-oom
-- Clear the ledger of old ids that are not in Redis any more; those that are stay listed.
-- KEYS[1] ids       sorted set: trajectory id by insertion number (the ledger)
-- KEYS[2] facts     hash: trajectory id -> what sampling must know, of those that are in Redis
-- KEYS[3] counters  hash: forgotten (the last number that was looked at)
-- ARGV[1] the last number that may be forgotten; ARGV[2] how many ids to look at at most
-- Returns how many were looked at.
local from = redis.call('HGET', KEYS[3], 'forgotten') or '0'
local found = redis.call('ZRANGE', KEYS[1], '(' .. from, ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[2], 'WITHSCORES')
for at = 1, #found, 2 do
  if redis.call('HEXISTS', KEYS[2], found[at]) == 0 then redis.call('ZREM', KEYS[1], found[at]) end
end
if #found > 0 then redis.call('HSET', KEYS[3], 'forgotten', found[#found]) end
return #found / 2
