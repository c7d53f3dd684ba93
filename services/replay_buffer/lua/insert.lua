#!lua
-- Insert trajectories of one run into its ledger and indices, each once, with their payloads.
-- KEYS[1] ids         sorted set: trajectory id by insertion number (the ledger)
-- KEYS[2] duplicates  hash: id of an offline trajectory whose content was there before -> id that stands for it
-- KEYS[3] content     hash: content digest -> id of the first trajectory with that content
-- KEYS[4] facts       hash: trajectory id -> what sampling must know: `correct:version:reward:group:prompt id`
-- KEYS[5] prompts     sorted set, all scores 0: `prompt id:insertion number, 16 digits:trajectory id`
-- KEYS[6] counters    hash: number (the last insertion number), inserted:<source>, correct:<source>
-- KEYS[7] copies      hash: id that stands for others -> how many
-- KEYS[8] payload     the key of a trajectory's payload, without the id at its end
-- KEYS[9] unstored    set: ids of runs with trajectories that are not in the experience store
-- KEYS[10] untrimmed  set: ids of runs with trajectories that may leave Redis
-- KEYS[11] outcomes   hash: prompt id -> `rollouts:right:wrong since the last right one`
-- KEYS[12] unsolved   set: prompts that were tried and have no right answer, ever or lately
-- KEYS[13..]          per source, its name last, a sorted set: trajectory id by insertion number
-- KEYS[#KEYS]         the run's spec: a deleted run gets no key again
-- ARGV[1] run id; ARGV[2] after so many wrong rollouts a prompt that was solved counts as unsolved again, 0 for never;
--   then per trajectory 6 values: id, index of its source's key, content digest ('' for live sources), facts, payload,
--   what it says of its prompt ('right' or 'wrong' rollout, 'known' answer, '' nothing). At most some hundred trajectories: each index is written by one command.
-- Returns nothing where the run is deleted, else one number per trajectory: 1 inserted, 0 the id is already there, -1 another id with the same content is.
if redis.call('EXISTS', KEYS[#KEYS]) == 0 then return {} end
local ids = {}
for at = 3, #ARGV, 6 do ids[#ids + 1] = ARGV[at] end
local known = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local before = tonumber(redis.call('HGET', KEYS[6], 'number') or 0)
local number = before
local results, counts, inserted, by_source = {}, {}, {}, {}
local payloads, ledger, facts, prompts = {}, {}, {}, {}
local outcomes = {}
for place, id in ipairs(ids) do
  local at = 6 * place - 3
  local key, content, fact = tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  local result = 1
  if known[place] or inserted[id] then
    result = 0
  elseif content ~= '' and redis.call('HSETNX', KEYS[3], content, id) == 0 then
    local stands = redis.call('HGET', KEYS[3], content)
    if redis.call('HSET', KEYS[2], id, stands) == 1 then redis.call('HINCRBY', KEYS[7], stands, 1) end
    result = -1
  else
    number = number + 1
    inserted[id] = true
    local last = #ledger
    payloads[last + 1], payloads[last + 2] = KEYS[8] .. id, ARGV[at + 4]
    ledger[last + 1], ledger[last + 2] = number, id
    facts[last + 1], facts[last + 2] = id, fact
    local prompt = string.match(fact, '^[^:]*:[^:]*:[^:]*:[^:]*:(.*)$')
    prompts[last + 1], prompts[last + 2] = 0, prompt .. ':' .. string.format('%016d', number) .. ':' .. id
    local numbered = by_source[key] or {}
    numbered[#numbered + 1] = number
    numbered[#numbered + 1] = id
    by_source[key] = numbered
    local source = string.match(KEYS[key], '[^:]*$')
    counts['inserted:' .. source] = (counts['inserted:' .. source] or 0) + 1
    counts['correct:' .. source] = (counts['correct:' .. source] or 0) + tonumber(string.sub(fact, 1, 1))
    if ARGV[at + 5] ~= '' then outcomes[#outcomes + 1] = {prompt, ARGV[at + 5]} end
  end
  results[place] = result
end
if number > before then
  redis.call('MSET', unpack(payloads))
  redis.call('ZADD', KEYS[1], unpack(ledger))
  redis.call('HSET', KEYS[4], unpack(facts))
  redis.call('ZADD', KEYS[5], unpack(prompts))
  for key, numbered in pairs(by_source) do redis.call('ZADD', KEYS[key], unpack(numbered)) end
  redis.call('HSET', KEYS[6], 'number', number)
  redis.call('SADD', KEYS[9], ARGV[1])
  redis.call('SADD', KEYS[10], ARGV[1])
  for name, count in pairs(counts) do redis.call('HINCRBY', KEYS[6], name, count) end
  local changes = 0
  for _, outcome in ipairs(outcomes) do
    local prompt, kind = outcome[1], outcome[2]
    local known = redis.call('HGET', KEYS[11], prompt) or '0:0:0'
    local tried, right, wrong = string.match(known, '(%d+):(%d+):(%d+)')
    tried, right, wrong = tonumber(tried), tonumber(right), tonumber(wrong)
    if kind ~= 'known' then tried = tried + 1 end
    if kind == 'wrong' then wrong = wrong + 1 else right, wrong = right + 1, 0 end
    redis.call('HSET', KEYS[11], prompt, string.format('%d:%d:%d', tried, right, wrong))
    local lately = tonumber(ARGV[2])
    local unsolved = tried > 0 and (right == 0 or (lately > 0 and wrong >= lately))
    changes = changes + redis.call(unsolved and 'SADD' or 'SREM', KEYS[12], prompt)
  end
  if changes > 0 then redis.call('HINCRBY', KEYS[6], 'unsolved', changes) end
end
return results
