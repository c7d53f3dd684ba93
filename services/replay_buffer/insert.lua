-- Enter trajectories into a run's ledger and sampling windows, each at most once. Payloads are SET by the caller before.
-- KEYS[1] ids       sorted set: trajectory id by insertion number (the ledger)
-- KEYS[2] content   hash: content digest -> trajectory id (first with that content)
-- KEYS[3] counters  hash: number, duplicates, inserted:<source>, correct:<source>, kept:<source>:<prompt>
-- KEYS[4..]         per source two sorted sets of sampling candidates by insertion number: all, correct
-- ARGV[1] online window; ARGV[2] candidates kept per prompt of an offline source; then per trajectory 6 values:
--   id, index of its source's first key, source, 1 if correct, prompt id, content digest ('' for online)
-- Returns one number per trajectory: 1 entered, 0 same id already there, -1 same content already there.
local results = {}
local window, per_prompt = tonumber(ARGV[1]), tonumber(ARGV[2])
for at = 3, #ARGV, 6 do
  local id, key, source, correct = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3] == '1'
  local prompt, content = ARGV[at + 4], ARGV[at + 5]
  local result = 1
  if redis.call('ZSCORE', KEYS[1], id) then
    result = 0
  elseif content ~= '' and redis.call('HSETNX', KEYS[2], content, id) == 0 then
    result = redis.call('HGET', KEYS[2], content) == id and 0 or -1
    redis.call('HINCRBY', KEYS[3], 'duplicates', 1)
  else
    local number = redis.call('HINCRBY', KEYS[3], 'number', 1)
    redis.call('ZADD', KEYS[1], number, id)
    redis.call('HINCRBY', KEYS[3], 'inserted:' .. source, 1)
    if correct then redis.call('HINCRBY', KEYS[3], 'correct:' .. source, 1) end
    if content == '' then
      redis.call('ZADD', KEYS[key], number, id)
      if correct then redis.call('ZADD', KEYS[key + 1], number, id) end
      redis.call('ZREMRANGEBYRANK', KEYS[key], 0, -window - 1)
      redis.call('ZREMRANGEBYRANK', KEYS[key + 1], 0, -window - 1)
    else
      local kind = correct and 'right:' or 'wrong:'
      if redis.call('HINCRBY', KEYS[3], 'kept:' .. kind .. source .. ':' .. prompt, 1) <= per_prompt then
        redis.call('ZADD', KEYS[key], number, id)
        if correct then redis.call('ZADD', KEYS[key + 1], number, id) end
      end
    end
  end
  results[#results + 1] = result
end
return results
