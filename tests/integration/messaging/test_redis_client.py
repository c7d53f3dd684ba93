"""The typed view of Redis tells the truth: its commands exist, and a real server's replies are of the written types."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from spo.messaging import redis_client as facade
from spo.messaging.redis_client import RedisClient, RedisPipeline, open_client, open_server

Call = Callable[[RedisClient], object]

# Command, and which of its overloads: what is called once `filled` has run. `withscores` stands second everywhere.
CALLS: dict[tuple[str, int], list[Call]] = {
    ("ping", 0): [lambda client: client.ping()],
    ("info", 0): [lambda client: client.info("server"), lambda client: client.info("memory", "persistence")],
    ("eval", 0): [lambda client: client.eval("return redis.call('GET', KEYS[1])", 1, "word")],
    ("get", 0): [lambda client: client.get("word"), lambda client: client.get("none")],
    ("mget", 0): [lambda client: client.mget(["word", "none"])],
    ("set", 0): [lambda client: client.set("word", "other", ex=60)],
    ("exists", 0): [lambda client: client.exists("word", "none")],
    ("delete", 0): [lambda client: client.delete("word", "none")],
    ("unlink", 0): [lambda client: client.unlink("word")],
    ("hget", 0): [lambda client: client.hget("hash", "a"), lambda client: client.hget("hash", "none")],
    ("hmget", 0): [lambda client: client.hmget("hash", ["a", b"none"])],
    ("hgetall", 0): [lambda client: client.hgetall("hash"), lambda client: client.hgetall("none")],
    ("hkeys", 0): [lambda client: client.hkeys("hash")],
    ("hvals", 0): [lambda client: client.hvals("hash")],
    ("hlen", 0): [lambda client: client.hlen("hash")],
    ("hexists", 0): [lambda client: client.hexists("hash", "a"), lambda client: client.hexists("hash", "none")],
    ("hincrby", 0): [lambda client: client.hincrby("hash", "counted", 2)],
    ("hset", 0): [lambda client: client.hset("hash", "c", 3)],
    ("hset", 1): [lambda client: client.hset("hash", mapping={"d": b"4", "e": 0.5})],
    ("hsetnx", 0): [lambda client: client.hsetnx("hash", "once", 1), lambda client: client.hsetnx("hash", "once", 2)],
    ("sadd", 0): [lambda client: client.sadd("set", "y", b"z")],
    ("srem", 0): [lambda client: client.srem("set", "x")],
    ("smembers", 0): [lambda client: client.smembers("set"), lambda client: client.smembers("none")],
    ("scard", 0): [lambda client: client.scard("set")],
    ("sismember", 0): [lambda client: client.sismember("set", "x"), lambda client: client.sismember("set", "y")],
    ("zadd", 0): [lambda client: client.zadd("sorted", {"c": 3})],
    ("zrem", 0): [lambda client: client.zrem("sorted", "a")],
    ("zcard", 0): [lambda client: client.zcard("sorted")],
    ("zscore", 0): [lambda client: client.zscore("sorted", "a"), lambda client: client.zscore("sorted", "none")],
    ("zmscore", 0): [lambda client: client.zmscore("sorted", ["a", b"none"])],
    ("zdiff", 0): [lambda client: client.zdiff(["sorted", "none"])],
    ("zrange", 0): [lambda client: client.zrange("sorted", 0, -1)],
    ("zrange", 1): [lambda client: client.zrange("sorted", 0, -1, withscores=True)],
    ("zrevrank", 0): [
        lambda client: client.zrevrank("sorted", client.zrevrange("sorted", 0, 0)[0]),
        lambda client: client.zrevrank("sorted", "nobody"),
    ],
    ("zrevrange", 0): [lambda client: client.zrevrange("sorted", 0, 0)],
    ("zrevrange", 1): [lambda client: client.zrevrange("sorted", 0, 0, withscores=True)],
    ("zrangebyscore", 0): [lambda client: client.zrangebyscore("sorted", "(0", "+inf", start=0, num=5)],
    ("zrangebyscore", 1): [lambda client: client.zrangebyscore("sorted", 0, 9, withscores=True)],
    ("zrevrangebyscore", 0): [lambda client: client.zrevrangebyscore("sorted", "+inf", "-inf", start=0, num=5)],
    ("zrevrangebyscore", 1): [lambda client: client.zrevrangebyscore("sorted", 9, 0, withscores=True)],
    ("zrevrangebylex", 0): [lambda client: client.zrevrangebylex("words", "+", "-", start=0, num=5)],
    ("xadd", 0): [lambda client: client.xadd("log", {"a": 1}, maxlen=10, approximate=True)],
    ("lrange", 0): [lambda client: client.lrange("list", 0, -1), lambda client: client.lrange("none", 0, -1)],
    ("xlen", 0): [lambda client: client.xlen("log")],
    ("xrange", 0): [lambda client: client.xrange("log", min="(0-0", count=5)],
    ("xrevrange", 0): [lambda client: client.xrevrange("log", max="+", count=1)],
    ("xread", 0): [
        lambda client: client.xread({"log": "0-0"}, count=5, block=1),
        lambda client: client.xread({"log": "9-0"}, count=5, block=1),
    ],
    ("xreadgroup", 0): [
        lambda client: client.xreadgroup("group", "b", {"log": ">"}, count=5, block=1),
        lambda client: client.xreadgroup("group", "b", {"log": ">"}, count=5, block=1),
    ],
    ("xinfo_groups", 0): [lambda client: client.xinfo_groups("log")],
}

# A pipeline's commands, all of them, and the types of their replies.
QUEUED: dict[str, tuple[Callable[[RedisPipeline], object], object]] = {
    "execute_command": (lambda pipe: pipe.execute_command("ECHO", "word"), bytes),
    "eval": (lambda pipe: pipe.eval("return {1, 'a'}", 0), list),
    "get": (lambda pipe: pipe.get("word"), bytes),
    "set": (lambda pipe: pipe.set("new", b"1"), bool),
    "exists": (lambda pipe: pipe.exists("word"), int),
    "delete": (lambda pipe: pipe.delete("none"), int),
    "expire": (lambda pipe: pipe.expire("word", 60), bool),
    "hget": (lambda pipe: pipe.hget("hash", "a"), bytes),
    "hmget": (lambda pipe: pipe.hmget("hash", ["a", b"none"]), list[bytes | None]),
    "hincrby": (lambda pipe: pipe.hincrby("hash", "a", 2), int),
    "hgetall": (lambda pipe: pipe.hgetall("hash"), dict[bytes, bytes]),
    "hkeys": (lambda pipe: pipe.hkeys("hash"), list[bytes]),
    "hlen": (lambda pipe: pipe.hlen("hash"), int),
    "hset": (lambda pipe: pipe.hset("hash", mapping={"f": 1}), int),
    "hsetnx": (lambda pipe: pipe.hsetnx("hash", "once", 1), int),
    "hdel": (lambda pipe: pipe.hdel("hash", "f", b"none"), int),
    "sadd": (lambda pipe: pipe.sadd("set", "w"), int),
    "srem": (lambda pipe: pipe.srem("set", b"w"), int),
    "zadd": (lambda pipe: pipe.zadd("sorted", {"d": 4}), int),
    "zrem": (lambda pipe: pipe.zrem("sorted", "d"), int),
    "zremrangebyscore": (lambda pipe: pipe.zremrangebyscore("sorted", 0, 1), int),
    "zcard": (lambda pipe: pipe.zcard("sorted"), int),
    "zscore": (lambda pipe: pipe.zscore("sorted", "a"), float),
    "zrange": (lambda pipe: pipe.zrange("sorted", 0, -1, withscores=True), list[tuple[bytes, float]]),
    "zrangebyscore": (lambda pipe: pipe.zrangebyscore("sorted", "(0", "+inf"), list[bytes]),
    "xadd": (lambda pipe: pipe.xadd("log", {"a": 2}, maxlen=10, approximate=True), bytes),
    "xlen": (lambda pipe: pipe.xlen("log"), int),
    "xinfo_groups": (lambda pipe: pipe.xinfo_groups("log"), list[facade.GroupState]),
    "xrevrange": (lambda pipe: pipe.xrevrange("log", count=1), list[facade.StreamEntry]),
}

# These end, open or enter something; the tests below use them.
LIFETIME = {"pipeline", "register_script", "lock", "close", "__enter__", "__exit__"}
PIPELINE_LIFETIME = {"execute", "__enter__", "__exit__"}


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def filled(
    redis_client: redis.Redis, redis_server: str, request: pytest.FixtureRequest
) -> typing.Iterator[RedisClient]:
    """A client as services have it, of a database with one key of each kind."""
    redis_client.set("word", "value")
    redis_client.hset("hash", mapping={"a": 1, "b": "two"})
    redis_client.sadd("set", "x")
    redis_client.zadd("sorted", {"a": 1, "b": 2.5})
    redis_client.zadd("words", {"a": 0, "b": 0})
    redis_client.rpush("list", "a", "b")
    redis_client.xadd("log", {"payload": b"\xff"}, id="1-0")
    redis_client.xgroup_create("log", "group", id="0")
    redis_client.xreadgroup("group", "a", {"log": ">"})
    redis_client.xadd("log", {"payload": b"\xfe"}, id="2-0")
    with open_client(f"{redis_server}?protocol={request.param}", operation_seconds=10, connect_seconds=5) as client:
        yield client


def commands(protocol: type) -> set[str]:
    """The names of its methods; typing adds some of its own, which come from elsewhere."""
    members = {name: member for name, member in vars(protocol).items() if inspect.isfunction(member)}
    written = {name for name in members if overloads(protocol, name) or members[name].__module__ == protocol.__module__}
    return written - {"__init__", "__subclasshook__"}


def overloads(protocol: type, command: str) -> list[Callable[..., object]]:
    """Its overloads as they are written: what stands in the class in their place does not know them."""
    named = types.SimpleNamespace(__module__=protocol.__module__, __qualname__=f"{protocol.__qualname__}.{command}")
    return list(typing.get_overloads(named))


def conforms(value: object, annotation: object) -> bool:
    """Whether a value is of a type; a tuple's place may also be taken by a list of as many, which unpacks alike."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, choice) for choice in arguments)
    if origin is typing.Literal:
        return value in arguments
    if typing.is_typeddict(annotation):
        fields = typing.get_type_hints(annotation)
        present = annotation.__required_keys__ | (fields.keys() & value.keys())
        return isinstance(value, dict) and all(conforms(value[name], fields[name]) for name in present)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(arguments) and all(map(conforms, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(
            conforms(key, arguments[0]) and conforms(held, arguments[1]) for key, held in value.items()
        )
    if origin in (list, set):
        return isinstance(value, origin) and all(conforms(member, arguments[0]) for member in value)
    if annotation is None or annotation is types.NoneType:
        return value is None
    # bool is an int to Python and no count to us.
    return type(value) is annotation if annotation in (int, float, bool) else isinstance(value, annotation)


def written_type(command: str, overload: int) -> object:
    methods = overloads(RedisClient, command) or [getattr(RedisClient, command)]
    return typing.get_type_hints(methods[overload], vars(facade))["return"]


def test_every_command_and_overload_of_the_protocols_is_called_below() -> None:
    expected = set()
    for command in commands(RedisClient) - LIFETIME:
        expected |= {(command, number) for number in range(len(overloads(RedisClient, command)) or 1)}
    assert set(CALLS) == expected
    assert set(QUEUED) == commands(RedisPipeline) - PIPELINE_LIFETIME


@pytest.mark.parametrize(("command", "overload"), CALLS, ids=lambda part: str(part))
def test_a_reply_has_the_type_that_is_written(filled: RedisClient, command: str, overload: int) -> None:
    for call in CALLS[command, overload]:
        reply = call(filled)
        assert conforms(reply, written_type(command, overload)), (reply, written_type(command, overload))


@pytest.mark.parametrize("command", QUEUED)
def test_a_queued_command_replies_when_the_pipeline_is_executed(filled: RedisClient, command: str) -> None:
    queue, annotation = QUEUED[command]
    with filled.pipeline(transaction=False) as pipe:
        queue(pipe)
        [reply] = pipe.execute(raise_on_error=True)
    assert conforms(reply, annotation), reply


def test_a_pipeline_returns_errors_in_their_places_when_asked_to(filled: RedisClient) -> None:
    with filled.pipeline(transaction=True) as pipe:
        pipe.xinfo_groups("none")
        pipe.xlen("none")
        error, length = pipe.execute(raise_on_error=False)
    assert isinstance(error, redis.ResponseError)
    assert length == 0


def test_a_script_returns_what_lua_returns(filled: RedisClient) -> None:
    script: facade.RedisScript[list[bytes]] = filled.register_script("return {KEYS[1], ARGV[1]}")
    assert script(keys=["word"], args=[1.5]) == [b"word", b"1.5"]


def test_a_lock_has_one_holder(filled: RedisClient) -> None:
    lock = filled.lock("lock", timeout=10, blocking=False)
    assert lock.acquire() is True
    assert filled.lock("lock", timeout=10, blocking=False).acquire() is False
    assert lock.reacquire() is True
    assert lock.owned() is True
    assert lock.release() is None
    assert lock.owned() is False


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("text", bytes),
        (True, int),
        ([b"a", "b"], list[bytes]),
        ([(b"a",)], list[tuple[bytes, float]]),
        ({b"a": 1}, dict[bytes, bytes]),
        (None, bytes),
        ({"name": b"g"}, dict[str, str]),
        ({"used_memory": "1"}, facade.ServerFacts),
    ],
)
def test_a_reply_of_another_type_is_noticed(value: object, annotation: object) -> None:
    assert not conforms(value, annotation)


def test_as_many_threads_as_wait_have_a_connection_each(redis_server: str) -> None:
    client = open_server(redis_server)
    with ThreadPoolExecutor(200) as threads:
        waiting = [threads.submit(client.blpop, ["nothing"], 1) for _ in range(200)]
        assert {each.result() for each in waiting} == {None}
