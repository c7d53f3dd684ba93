#!lua flags=allow-oom
-- Decide once which insertion numbers the next file of the experience store holds.
-- KEYS[1] stored  hash: written (last insertion number stored), planned (last of the file under way, while there is one)
-- ARGV[1] written as the caller read it; ARGV[2] the last insertion number it wants in the file
-- Returns {written, planned}: the file to be written now, by whichever replica; planned = written when there is none.
local written = redis.call('HGET', KEYS[1], 'written') or '0'
local planned = redis.call('HGET', KEYS[1], 'planned')
if not planned and written == ARGV[1] then
  redis.call('HSET', KEYS[1], 'planned', ARGV[2])
  planned = ARGV[2]
end
return {written, planned or written}
