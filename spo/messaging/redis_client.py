"""Redis as the platform sees it: its commands with the types they have here, connections, and two small writes (capped
logs, and what must work when Redis is full).

redis-py annotates every command for its synchronous and its asynchronous client at once, so each reply has to be cast
or goes unchecked. These protocols describe the very same objects: nothing is wrapped, a call costs what it did. A test
runs each command on a real server and compares its reply with what is written here. `connect` returns one.

Small writes that steer the platform, done in one step even where Redis is full: who frees memory must not need any.
Redis at `maxmemory` refuses every command that could grow it. Scripts that say `allow-oom` are excepted; the room for
them is what the machine has above `maxmemory`. Payloads never go this way.

Records that are kept for people to read, the newest so many of them: audit entries, log lines.
Not work: nobody consumes them, so trimming loses nothing that is owed. Work travels by `spo.messaging.streams`.

SPO_REDIS_URL: one server by its address, or the primary that Redis Sentinels name, followed through failovers.
    redis://[user:password@]host:port[/db]                                     rediss:// and unix:// too
    redis+sentinel://[user:password@]host:port,host:port/SERVICE[/db][?...]    rediss+sentinel:// with TLS

user and password are the server's; the Sentinels' own are sentinel_user and sentinel_password in the query.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, Self, TypedDict, TypeVar, cast, overload
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, parse_url as parse_server_url

from spo.errors import InternalError, InvalidInput, NotReady, SpoError, Unreachable
from spo.observability import get_logger

Word = str | bytes

Value = str | bytes | int | float
Fields = Mapping[str, Value] | Mapping[bytes, Value]

StreamEntry = tuple[bytes, dict[bytes, bytes]]

StreamReplies = list[tuple[bytes, list[StreamEntry]]] | dict[bytes, list[list[StreamEntry]]]

Members = set[bytes]

Reply_co = TypeVar("Reply_co", covariant=True)

# ARGV: per command the number of its words, then the words.  (Keys travel inside them: one server, no cluster slots.)
_WRITE = """#!lua flags=allow-oom
local at = 1
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
"""

"""A name of something in Redis: a field, a member, an entry id. Keys are always str."""

"""An entry's id and its fields."""

"""Stream -> entries: pairs under RESP2; under RESP3 a mapping, the entries in a list of one."""


class ServerFacts(TypedDict, total=False):
    """What the platform reads of INFO; the fields of the sections that were asked for are there."""

    redis_version: str
    valkey_version: str
    used_memory: int
    maxmemory: int
    maxmemory_policy: str
    aof_enabled: int
    aof_last_write_status: str
    aof_last_bgrewrite_status: str
    aof_rewrite_in_progress: int
    aof_rewrite_scheduled: int
    errorstat_MISCONF: dict[str, int]
    total_commands_processed: int
    total_net_input_bytes: int
    total_net_output_bytes: int
    role: str


GroupState = TypedDict(
    "GroupState",
    {
        "name": bytes,
        "consumers": int,
        "pending": int,
        "last-delivered-id": bytes,
        "entries-read": int | None,
        "lag": int | None,
    },
)


class RedisScript(Protocol[Reply_co]):
    """A Lua script that the server knows by its digest; whoever registers it declares what it returns."""

    def __call__(self, keys: Sequence[str], args: Sequence[Value]) -> Reply_co:
        """Run it; sent again where the server has forgotten it."""


class RedisLock(Protocol):
    """A key that one holder at a time has."""

    def acquire(self) -> bool:
        """Take it; False where another has it."""

    def reacquire(self) -> bool:
        """Hold it for its whole time from now on. Raises redis.exceptions.LockError when it is lost."""

    def owned(self) -> bool:
        """Whether this holder still has it."""

    def release(self) -> None:
        """Give it up. Raises redis.exceptions.LockError when it is lost."""


class RedisClient(Protocol):
    """`redis.Redis`, as far as the platform uses it. Every command raises redis.RedisError."""

    def pipeline(self, *, transaction: bool) -> RedisPipeline: ...
    def register_script(self, script: str) -> RedisScript[Any]: ...
    def lock(self, name: str, *, timeout: float, blocking: bool) -> RedisLock: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def ping(self) -> bool: ...
    def info(self, *sections: str) -> ServerFacts: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: Value) -> object: ...

    def get(self, name: str) -> bytes | None: ...
    def mget(self, keys: Sequence[str]) -> list[bytes | None]: ...
    def set(self, name: str, value: Value, *, ex: int | None = None) -> bool | None: ...
    def exists(self, *names: str) -> int: ...
    def delete(self, *names: str) -> int: ...
    def unlink(self, *names: str) -> int: ...

    def hget(self, name: str, key: Word) -> bytes | None: ...
    def hincrby(self, name: str, key: str, amount: int) -> int: ...
    def hmget(self, name: str, keys: Sequence[Word]) -> list[bytes | None]: ...
    def hgetall(self, name: str) -> dict[bytes, bytes]: ...
    def hkeys(self, name: str) -> list[bytes]: ...
    def hvals(self, name: str) -> list[bytes]: ...
    def hlen(self, name: str) -> int: ...
    def hexists(self, name: str, key: Word) -> bool: ...
    @overload
    def hset(self, name: str, key: Word, value: Value) -> int: ...
    @overload
    def hset(self, name: str, *, mapping: Fields) -> int: ...

    def hsetnx(self, name: str, key: Word, value: Value) -> int: ...
    def sadd(self, name: str, *members: Word) -> int: ...
    def srem(self, name: str, *members: Word) -> int: ...
    def smembers(self, name: str) -> Members: ...
    def scard(self, name: str) -> int: ...
    def sismember(self, name: str, member: Word) -> Literal[0, 1]: ...

    def zadd(self, name: str, mapping: Mapping[str, float]) -> int: ...
    def zrem(self, name: str, *members: Word) -> int: ...
    def zcard(self, name: str) -> int: ...
    def zscore(self, name: str, member: Word) -> float | None: ...
    def zmscore(self, key: str, members: list[str] | list[bytes]) -> list[float | None]: ...
    def zdiff(self, keys: Sequence[str]) -> list[bytes]: ...
    @overload
    def zrange(self, name: str, first: int, last: int) -> list[bytes]: ...
    @overload
    def zrange(self, name: str, first: int, last: int, *, withscores: Literal[True]) -> list[tuple[bytes, float]]: ...
    def zrevrank(self, name: str, member: Word) -> int | None: ...
    @overload
    def zrevrange(self, name: str, first: int, last: int) -> list[bytes]: ...
    @overload
    def zrevrange(
        self, name: str, first: int, last: int, *, withscores: Literal[True]
    ) -> list[tuple[bytes, float]]: ...
    @overload
    def zrangebyscore(
        self, name: str, lowest: Value, highest: Value, start: int | None = None, num: int | None = None
    ) -> list[bytes]: ...
    @overload
    def zrangebyscore(
        self,
        name: str,
        lowest: Value,
        highest: Value,
        start: int | None = None,
        num: int | None = None,
        *,
        withscores: Literal[True],
    ) -> list[tuple[bytes, float]]: ...
    @overload
    def zrevrangebyscore(
        self, name: str, highest: Value, lowest: Value, start: int | None = None, num: int | None = None
    ) -> list[bytes]: ...
    @overload
    def zrevrangebyscore(
        self,
        name: str,
        highest: Value,
        lowest: Value,
        start: int | None = None,
        num: int | None = None,
        *,
        withscores: Literal[True],
    ) -> list[tuple[bytes, float]]: ...
    def zrevrangebylex(
        self, name: str, highest: Word, lowest: Word, start: int | None = None, num: int | None = None
    ) -> list[bytes]: ...

    def xadd(
        self, name: str, fields: Fields, *, maxlen: int | None = None, approximate: bool = True
    ) -> bytes | None: ...
    def lrange(self, name: str, start: int, end: int) -> list[bytes]: ...
    def xlen(self, name: str) -> int: ...
    def xrange(
        self, name: str, min: Word | int = "-", max: Word | int = "+", count: int | None = None
    ) -> list[StreamEntry]: ...
    def xrevrange(
        self, name: str, max: Word | int = "+", min: Word | int = "-", count: int | None = None
    ) -> list[StreamEntry]: ...
    def xread(self, streams: Mapping[str, Word], *, count: int, block: int) -> StreamReplies: ...
    def xreadgroup(
        self, groupname: str, consumername: str, streams: Mapping[str, Word], *, count: int, block: int
    ) -> StreamReplies: ...
    def xinfo_groups(self, name: str) -> list[GroupState]: ...


class RedisPipeline(Protocol):
    """`redis.client.Pipeline`: commands go to the server at `execute`, which returns their replies in their order.

    A reply has the type that the command of the same name has on RedisClient.
    """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def execute(self, *, raise_on_error: bool = True) -> list[Any]: ...
    def execute_command(self, *words: Value) -> Self: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: Value) -> Self: ...

    def get(self, name: str) -> Self: ...
    def set(self, name: str, value: Value) -> Self: ...
    def exists(self, *names: str) -> Self: ...
    def delete(self, *names: str) -> Self: ...
    def expire(self, name: str, time: int) -> Self: ...

    def hget(self, name: str, key: Word) -> Self: ...
    def hmget(self, name: str, keys: Sequence[Word]) -> Self: ...
    def hincrby(self, name: str, key: str, amount: int) -> Self: ...
    def hgetall(self, name: str) -> Self: ...
    def hkeys(self, name: str) -> Self: ...
    def hlen(self, name: str) -> Self: ...
    @overload
    def hset(self, name: str, key: Word, value: Value) -> Self: ...
    @overload
    def hset(self, name: str, *, mapping: Fields) -> Self: ...
    def hsetnx(self, name: str, key: Word, value: Value) -> Self: ...
    def hdel(self, name: str, *keys: Word) -> Self: ...

    def sadd(self, name: str, *members: Word) -> Self: ...
    def srem(self, name: str, *members: Word) -> Self: ...

    def zadd(self, name: str, mapping: Mapping[str, float]) -> Self: ...
    def zrem(self, name: str, *members: Word) -> Self: ...
    def zcard(self, name: str) -> Self: ...
    def zremrangebyscore(self, name: str, lowest: Value, highest: Value) -> Self: ...
    def zscore(self, name: str, member: Word) -> Self: ...
    def zrange(self, name: str, first: int, last: int, *, withscores: bool = False) -> Self: ...
    def zrangebyscore(self, name: str, lowest: Value, highest: Value, *, withscores: bool = False) -> Self: ...

    def xadd(self, name: str, fields: Fields, *, maxlen: int | None = None, approximate: bool = True) -> Self: ...
    def xlen(self, name: str) -> Self: ...
    def xinfo_groups(self, name: str) -> Self: ...
    def xrevrange(self, name: str, max: Word | int = "+", min: Word | int = "-", count: int | None = None) -> Self: ...


def write_even_when_full(client: RedisClient, *commands: Sequence[str | bytes | int | float]) -> None:
    """Run commands in one atomic step, also at `maxmemory`. Raises redis.RedisError; then none has been written."""
    client.eval(_WRITE, 0, *(word for command in commands for word in (len(command), *command)))


def append_record(client: RedisClient | RedisPipeline, stream: str, fields: Mapping[str, str | int], keep: int) -> None:
    """Append one record (also to a pipeline) and let go of those beyond about `keep`."""
    client.xadd(stream, fields, maxlen=keep, approximate=True)


def record_words(stream: str, fields: Mapping[str, str | int], keep: int) -> list[str | int]:
    """The command of append_record, for a log that goes on while Redis is full."""
    return ["XADD", stream, "MAXLEN", "~", keep, "*", *(word for field in fields.items() for word in field)]


SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
SERVER_SCHEMES = ("redis", "rediss", "unix")
SENTINEL_PORT = 26379
# A Sentinel that is gone is passed over soon: the next one knows the primary too.
SENTINEL_SECONDS = 1.0
KNOWN_OPTIONS = {*URL_QUERY_ARGUMENT_PARSERS, "client_name", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile"}

Address = tuple[str, int]

log = get_logger("redis")


@contextmanager
def unless_away(lost: str, **facts: str) -> Iterator[None]:
    """Go on without what Redis does not take now: a warning says what is lost by it, in words."""
    try:
        yield
    except redis.RedisError as error:
        log.warning(lost, **facts, reason=str(error), full=refuses_writes(error))


OPERATION_TIMEOUT_SECONDS = 30.0
# Of one client. The threads of a process bound it, hundreds where trainers or streams wait; redis-py's own bound of 100
# is an error at once and no wait. `max_connections` in a URL goes first.
MOST_CONNECTIONS = 4096
TELL_SECONDS = 5.0
OLDEST_REDIS = (7, 2)
NO_EVICTION = "noeviction"
# Answers that a server gives for a while; redis-py takes the words of those that it knows off their messages, and puts
# the command before the answer within a pipeline.
_REFUSALS = (
    redis.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.TryAgainError,
)
_REFUSAL = re.compile(r"(?:^|caused error: )(?:NOREPLICAS|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOPERM|BUSY)\b")

KNOWN_OPTIONS |= {"ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_ciphers", "username", "password"}


@dataclass(frozen=True)
class RedisPlace:
    """A server; or the primary of a service, whose address the Sentinels say."""

    address: str
    """For messages and logs: without user, password and options."""
    url: str
    sentinels: tuple[Address, ...] = ()
    service: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)


def parse_redis_url(url: str) -> RedisPlace:
    """Raises InvalidInput (code "bad_redis_url") that says what is wrong, and nothing of what the URL holds."""
    if url.partition("://")[0].lower() in SENTINEL_SCHEMES:
        return _sentinel_place(url)
    parts = _split(url)
    if parts.scheme not in SERVER_SCHEMES:
        _refuse(f"it begins with none of {', '.join(f'{each}://' for each in (*SERVER_SCHEMES, *SENTINEL_SCHEMES))}")
    if "," in parts.netloc.rpartition("@")[2]:
        _refuse("several hosts are Sentinels, and their URL begins with redis+sentinel://")
    port = _port_of(parts.netloc.rpartition("@")[2], 6379)
    if parts.scheme != "unix":
        _database(parts.path.strip("/"))
    _options(url)
    return RedisPlace(f"{parts.hostname or 'localhost'}:{port}{parts.path}", url)


def open_server(url: str, **settings: float) -> redis.Redis:
    """A client that has not called the server yet. Raises InvalidInput (code "bad_redis_url")."""
    place = parse_redis_url(url)
    if not place.sentinels:
        return redis.Redis.from_url(url, max_connections=MOST_CONNECTIONS, **settings)
    bound = {"max_connections": MOST_CONNECTIONS}
    # Without types in redis-py.
    sentinels: Any = cast(Any, Sentinels)(place.sentinels, sentinel_kwargs=place.sentinel_options)
    return cast(redis.Redis, sentinels.master_for(place.service, **{**bound, **settings, **place.options}))


@asynccontextmanager
async def open_async_server(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """The same for asyncio; closed in the end."""
    place = parse_redis_url(url)
    if not place.sentinels:
        async with redis.asyncio.Redis.from_url(url, max_connections=MOST_CONNECTIONS) as client:
            yield client
        return
    sentinels: Any = cast(Any, AsyncSentinels)(place.sentinels, sentinel_kwargs=place.sentinel_options)
    try:
        options = {"max_connections": MOST_CONNECTIONS, **place.options}
        async with sentinels.master_for(place.service, **options) as client:
            yield client
    finally:
        for sentinel in sentinels.sentinels:
            await sentinel.aclose()


class Sentinels(redis.sentinel.Sentinel):
    """As redis-py's, for threads: its way of moving the one that answered to the front can lose another."""

    def discover_master(self, service_name: str) -> Address:
        """Raises MasterNotFoundError; AuthenticationError where a Sentinel refuses us and no other answers."""
        refused = None
        for sentinel in self.sentinels:
            try:
                primary = _primary(sentinel.sentinel_masters(), service_name)
            except redis.AuthenticationError as error:
                refused = error
                continue
            except (redis.ConnectionError, redis.TimeoutError):
                continue
            if primary:
                self.sentinels = [sentinel, *(each for each in self.sentinels if each is not sentinel)]
                return primary
        raise refused or _no_primary(service_name)


class AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    """The same for asyncio, where tasks take turns."""

    async def discover_master(self, service_name: str) -> Address:
        """Raises MasterNotFoundError; AuthenticationError where a Sentinel refuses us and no other answers."""
        refused = None
        for sentinel in self.sentinels:
            try:
                primary = _primary(await sentinel.sentinel_masters(), service_name)
            except redis.AuthenticationError as error:
                refused = error
                continue
            except (redis.ConnectionError, redis.TimeoutError):
                continue
            if primary:
                self.sentinels = [sentinel, *(each for each in self.sentinels if each is not sentinel)]
                return primary
        raise refused or _no_primary(service_name)


def _primary(told: object, service: str) -> Address | None:
    """The address in a Sentinel's account of its services; None where that server is thought to be down."""
    state = cast(Mapping[str, Mapping[str, Any]], told).get(service)
    if not state or not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return None
    return state["ip"], state["port"]


def _no_primary(service: str) -> redis.sentinel.MasterNotFoundError:
    return redis.sentinel.MasterNotFoundError(f"no Sentinel names a primary of {service} that is up")


def _sentinel_place(url: str) -> RedisPlace:
    # Apart from the rest: Python refuses several hosts of which one is an IPv6 address (since 3.11.12).
    before, mark, after = url.partition("://")
    place = re.split(r"[/?#]", after, maxsplit=1)[0]
    user, at, hosts = place.rpartition("@")
    parts = _split(f"{before}{mark}{user}{at}server{after[len(place) :]}")
    sentinels = tuple(_sentinel(each) for each in hosts.split(","))
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not service:
        _refuse("the name of the service is missing: .../NAME after the addresses of the Sentinels")
    _database(database)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    own = {name: query.pop(f"sentinel_{name}", None) for name in ("user", "password")}
    scheme = SENTINEL_SCHEMES[parts.scheme]
    options = _options(f"{scheme}://{user}{at}server:1/{database}?{urlencode(query)}")
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    secure = {"ssl": True} if scheme == "rediss" else {}
    to_sentinels = secure | {name: value for name, value in options.items() if name.startswith("ssl_")}
    to_sentinels |= {"username": own["user"], "password": own["password"]}
    to_sentinels |= {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
    # Asked anew by whoever connects; of several the next one is asked at once.
    to_sentinels |= {"retry": None}
    address = f"{unquote(service)}/{database or 0} of the Sentinels at {hosts}"
    return RedisPlace(address, url, sentinels, unquote(service), options | secure, to_sentinels)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        _refuse("its host is not one")
    if parts.fragment:
        _refuse("it holds a #")
    return parts


def _sentinel(text: str) -> Address:
    port = _port_of(text, SENTINEL_PORT)
    host = urlsplit(f"//{text}").hostname
    if not host:
        _refuse("one of the Sentinels has no host")
    return host, port


def _port_of(host: str, default: int) -> int:
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = 0
    if port == 0:
        _refuse("a port is not a number from 1 to 65535")
    return port or default


def _database(text: str) -> None:
    if text and not (text.isascii() and text.isdigit()):
        _refuse("the database, the last part of its path, is not a number")


def _options(url: str) -> dict[str, Any]:
    if unknown := {name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)} - KNOWN_OPTIONS:
        _refuse(f"{len(unknown)} of the options after the ? are unknown; known are {', '.join(sorted(KNOWN_OPTIONS))}")
    try:
        return dict(cast(Any, parse_server_url)(url))
    except ValueError:
        _refuse("an option after the ? has a value that it cannot have")


def _refuse(what: str) -> NoReturn:
    raise InvalidInput(
        f"SPO_REDIS_URL is wrong: {what}. A password's characters other than letters and digits are written %XX",
        code="bad_redis_url",
    )


def connect(url: str, wait_seconds: float = 30.0) -> RedisClient:
    """Return a client that has answered PING; payloads stay bytes.

    Raises Unreachable naming the address: "redis_unreachable" when the server does not answer in wait_seconds,
    "redis_failover" when its Sentinels name no primary in that time, "redis_refused" at once when it does not take the
    password; InvalidInput (code "bad_redis_url") when the URL is none.
    """
    client = open_client(url, OPERATION_TIMEOUT_SECONDS, connect_seconds=5.0)
    deadline = time.monotonic() + wait_seconds
    told_at = time.monotonic()
    while True:
        try:
            client.ping()
            return client
        except redis.AuthenticationError as error:
            raise Unreachable(
                f"Redis at {public_address(url)} refuses the user or password in SPO_REDIS_URL ({error})",
                code="redis_refused",
            ) from error
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                if isinstance(error, redis.sentinel.MasterNotFoundError):
                    raise _failover(public_address(url), f"for {wait_seconds:g} s") from error
                raise Unreachable(
                    f"Redis at {public_address(url)} did not answer within {wait_seconds:g} s ({error}); "
                    "start it or set SPO_REDIS_URL",
                    code="redis_unreachable",
                ) from error
            if time.monotonic() - told_at > TELL_SECONDS:
                told_at = time.monotonic()
                # Loading its data is among the reasons, and can take minutes.
                log.warning("waiting for Redis", at=public_address(url), reason=str(error), seconds=wait_seconds)
            time.sleep(0.2)


def open_client(url: str, operation_seconds: float, connect_seconds: float) -> RedisClient:
    """A client that has not called the server yet; the one place where a redis.Redis gets the platform's types."""
    return cast(
        RedisClient,
        open_server(
            url, socket_timeout=operation_seconds, socket_connect_timeout=connect_seconds, health_check_interval=15
        ),
    )


def unfit(client: RedisClient) -> str:
    """Why what the platform keeps is not safe in this server, and what to do; "" where it is, or does not say more.

    INFO says it, which managed servers answer where they refuse CONFIG. Raises redis.RedisError where it is away.
    """
    try:
        told = client.info()
    except redis.ResponseError as error:
        return f"it does not answer INFO, which says whether it evicts ({error}): allow it, ACL SETUSER NAME +info"
    version = told.get("valkey_version") or told.get("redis_version", "")
    if (number := version_number(version)) and number < OLDEST_REDIS:
        return f"it is version {version}, and WAITAOF came with 7.2: take Redis 7.2 or newer, or Valkey"
    policy = told.get("maxmemory_policy", NO_EVICTION)
    if policy != NO_EVICTION:
        return (
            f"it evicts keys when its memory is full (maxmemory-policy {policy}), jobs and experience among them: "
            "CONFIG SET maxmemory-policy noeviction, and in its configuration"
        )
    return ""


def version_number(version: str) -> tuple[int, ...]:
    """MAJOR.MINOR; () where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def refuses_writes(error: redis.RedisError) -> bool:
    """Whether the server is full: its memory (maxmemory, noeviction) or the disk of its append-only file."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "MISCONF" in str(error)


def refuses_for_now(error: redis.RedisError) -> bool:
    """Whether the server answers that it takes no such command now, full or not: the next may be taken.

    It is a replica by now (as after a failover), has too few of them, is at a script, or an operator took a right away.
    """
    return isinstance(error, _REFUSALS) or _REFUSAL.search(str(error)) is not None


def as_spo_error(error: redis.RedisError) -> SpoError:
    """What a failed command means for the caller of a service: later, where the server is full, away or starting."""
    if refuses_writes(error):
        return NotReady(f"Redis is full and refuses writes: {error}", code="redis_full")
    if refuses_for_now(error):
        return NotReady(f"Redis takes no such command now ({type(error).__name__}): {error}", code="redis_refuses")
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return _failover("Redis", f"now ({error})")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return Unreachable(f"Redis did not answer: {error}", code="redis_unreachable")
    return InternalError(f"{type(error).__name__}: {error}")


@contextmanager
def only_this_job() -> Iterator[None]:
    """One job's part of a round over many: what Redis says of that job's keys ends its part and no other's.

    A key that holds another type than the command is for. Raises redis.RedisError for an outage, which all wait for.
    """
    try:
        yield
    except redis.RedisError as error:
        if as_spo_error(error).retryable:
            raise


def replies_by_key(pipe: RedisPipeline) -> list[Any]:
    """The replies of a pipeline that reads keys of many jobs; None where one holds another type than was asked for.

    Raises redis.RedisError for an outage.
    """
    replies = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.RedisError) and as_spo_error(reply).retryable:
            raise reply
    return [None if isinstance(reply, redis.RedisError) else reply for reply in replies]


def public_address(url: str) -> str:
    """The URL without its password, for messages and logs. Raises InvalidInput (code "bad_redis_url")."""
    return parse_redis_url(url).address


def _failover(address: str, since: str) -> Unreachable:
    return Unreachable(
        f"{address}: no Sentinel names a primary that is up, {since}. A failover ends by itself; else SPO_REDIS_URL "
        "names a service that the Sentinels do not watch, or none of them answers",
        code="redis_failover",
    )
