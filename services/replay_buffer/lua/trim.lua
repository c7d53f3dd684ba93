#!lua flags=allow-oom
-- Take trajectories of one source out of Redis, unless a batch has been recorded since the caller looked.
-- KEYS[1] ids       sorted set: trajectory id by insertion number (the ledger)
-- KEYS[2] facts     hash: trajectory id -> what sampling must know
-- KEYS[3] prompts   sorted set: `prompt id:insertion number, 16 digits:trajectory id`
-- KEYS[4] counters  hash: drawn (number of the last batch), forgotten (the ledger is cleared up to this number)
-- KEYS[5] source    sorted set: trajectory id by insertion number
-- KEYS[6] payload   the key of a trajectory's payload, without the id at its end
-- ARGV[1] the number of the last batch that the caller knows, then per trajectory: id, insertion number
-- Returns how many were taken out; -1, with nothing done, when there is a newer batch.
if (redis.call('HGET', KEYS[4], 'drawn') or '0') ~= ARGV[1] then return -1 end
local forgotten = tonumber(redis.call('HGET', KEYS[4], 'forgotten') or 0)
local trimmed = 0
for at = 2, #ARGV, 2 do
  local id, number = ARGV[at], tonumber(ARGV[at + 1])
  local fact = redis.call('HGET', KEYS[2], id)
  if fact then
    local prompt = string.match(fact, '^[^:]*:[^:]*:[^:]*:[^:]*:(.*)$')
    redis.call('ZREM', KEYS[3], prompt .. ':' .. string.format('%016d', number) .. ':' .. id)
    redis.call('HDEL', KEYS[2], id)
  end
  redis.call('ZREM', KEYS[5], id)
  trimmed = trimmed + redis.call('UNLINK', KEYS[6] .. id)
  -- The ledger has been cleared up to there already, and passed this one over.
  if number <= forgotten then redis.call('ZREM', KEYS[1], id) end
end
return trimmed
