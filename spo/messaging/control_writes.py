"""Small writes that steer the platform, done in one step even where Redis is full: who frees memory must not need any.

Redis at `maxmemory` refuses every command that could grow it. Scripts that say `allow-oom` are excepted; the room for
them is what the machine has above `maxmemory`. Payloads never go this way.
"""

from __future__ import annotations

from collections.abc import Sequence

from spo.messaging.redis_client import RedisClient

# ARGV: per command the number of its words, then the words.  (Keys travel inside them: one server, no cluster slots.)
_WRITE = """#!lua flags=allow-oom
local at = 1
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
"""


def write_even_when_full(client: RedisClient, *commands: Sequence[str | bytes | int | float]) -> None:
    """Run commands in one atomic step, also at `maxmemory`. Raises redis.RedisError; then none has been written."""
    client.eval(_WRITE, 0, *(word for command in commands for word in (len(command), *command)))
