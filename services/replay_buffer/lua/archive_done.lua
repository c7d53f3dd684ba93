#!lua flags=allow-oom
-- The planned file is written: the position moves, once.
-- KEYS[1] stored  hash: written, planned
-- ARGV[1] written, ARGV[2] planned, as `archive_plan.lua` gave them
-- Returns 1 when this call moved the position, 0 when another had moved it before.
local written = redis.call('HGET', KEYS[1], 'written') or '0'
if written ~= ARGV[1] or redis.call('HGET', KEYS[1], 'planned') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'written', ARGV[2])
redis.call('HDEL', KEYS[1], 'planned')
return 1
