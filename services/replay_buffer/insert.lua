-- Enter trajectories of one run into its ledger and indices, each once, with their payloads.
-- KEYS[1] ids         sorted set: trajectory id by insertion number (the ledger)
-- KEYS[2] duplicates  hash: id of an offline trajectory whose content was there before -> id that stands for it
-- KEYS[3] content     hash: content digest -> id of the first trajectory with that content
-- KEYS[4] facts       hash: trajectory id -> what sampling must know, as the caller words it
-- KEYS[5] prompts     sorted set, all scores 0: `prompt id:insertion number, 16 digits:trajectory id`
-- KEYS[6] counters    hash: number (the last insertion number), inserted:<source>, correct:<source>
-- KEYS[7] copies      hash: id that stands for others -> how many
-- KEYS[8] payload     the key of a trajectory's payload, without the id at its end
-- KEYS[9] unstored    set: ids of runs of which something is to be stored outside
-- KEYS[10..]          per source a sorted set: trajectory id by insertion number
-- ARGV[1] run id, then per trajectory 8 values: id, index of its source's key, source, content digest ('' for online), 1 if correct,
--   facts, prompt id, payload
-- Returns one number per trajectory: 1 entered, 0 same id already there, -1 another id with the same content is there.
local results = {}
local before = tonumber(redis.call('HGET', KEYS[6], 'number') or 0)
local number = before
local counts = {}
for at = 2, #ARGV, 8 do
  local id, key, source, content = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  local result = 1
  if redis.call('ZSCORE', KEYS[1], id) then
    result = 0
  elseif content ~= '' and redis.call('HSETNX', KEYS[3], content, id) == 0 then
    local stands = redis.call('HGET', KEYS[3], content)
    if redis.call('HSET', KEYS[2], id, stands) == 1 then redis.call('HINCRBY', KEYS[7], stands, 1) end
    result = -1
  else
    number = number + 1
    -- First: where memory is short, nothing of it is entered.
    redis.call('SET', KEYS[8] .. id, ARGV[at + 7])
    redis.call('ZADD', KEYS[1], number, id)
    redis.call('HSET', KEYS[4], id, ARGV[at + 5])
    redis.call('ZADD', KEYS[5], 0, ARGV[at + 6] .. ':' .. string.format('%016d', number) .. ':' .. id)
    redis.call('ZADD', KEYS[key], number, id)
    counts['inserted:' .. source] = (counts['inserted:' .. source] or 0) + 1
    counts['correct:' .. source] = (counts['correct:' .. source] or 0) + tonumber(ARGV[at + 4])
  end
  results[#results + 1] = result
end
if number > before then
  redis.call('HSET', KEYS[6], 'number', number)
  redis.call('SADD', KEYS[9], ARGV[1])
  for name, count in pairs(counts) do redis.call('HINCRBY', KEYS[6], name, count) end
end
return results
