"""SPO_REDIS_URL and what it names: one server, or the primary that Sentinels name, connected to within a time limit.

SPO_REDIS_URL: one server by its address, or the primary that Redis Sentinels name, followed through failovers.
    redis://[user:password@]host:port[/db]                                     rediss:// and unix:// too
    redis+sentinel://[user:password@]host:port,host:port/SERVICE[/db][?...]    rediss+sentinel:// with TLS

user and password are the server's; the Sentinels' own are sentinel_user and sentinel_password in the query.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, parse_url as parse_server_url

from spo.errors import InternalError, InvalidInput, NotReady, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.observability import get_logger

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


def as_spo_error(error: redis.RedisError) -> SpoError:
    """What a failed command means for the caller of a service: later, where the server is full, away or starting."""
    if refuses_writes(error):
        return NotReady(f"Redis is full and refuses writes: {error}", code="redis_full")
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return _failover("Redis", f"now ({error})")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return Unreachable(f"Redis did not answer: {error}", code="redis_unreachable")
    return InternalError(f"{type(error).__name__}: {error}")


def public_address(url: str) -> str:
    """The URL without its password, for messages and logs. Raises InvalidInput (code "bad_redis_url")."""
    return parse_redis_url(url).address


def _failover(address: str, since: str) -> Unreachable:
    return Unreachable(
        f"{address}: no Sentinel names a primary that is up, {since}. A failover ends by itself; else SPO_REDIS_URL "
        "names a service that the Sentinels do not watch, or none of them answers",
        code="redis_failover",
    )
