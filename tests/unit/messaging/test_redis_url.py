"""What SPO_REDIS_URL may be, and that whatever is wrong with it is said without what it holds."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import pytest

from spo.errors import InvalidInput
from spo.messaging import redis_client
from spo.messaging.redis_client import parse_redis_url

WRONG = {
    "": "begins with none of redis://",
    "http://:canary@there": "begins with none of redis://",
    "redis://:canary@there:port/0": "port is not a number",
    "redis://:canary@there:99999/0": "port is not a number",
    "redis://:canary@there:0/0": "port is not a number",
    "redis://:can/ary@there:6379/0": "port is not a number",
    "redis://:12/canary@there:6379/0": "the database",
    "redis://:canary?x@there:6379/0": "port is not a number",
    "redis://:12?canary@there:6379/0": "options after the . are unknown",
    "redis://:canary#x@there:6379/0": "holds a #",
    "redis://:canary@[there/0": "its host is not one",
    "redis://:canary@there/first": "the database",
    "redis://:canary@there/0?socket_timeout=canary": "a value that it cannot have",
    "redis://:canary@there/0?canary=1": "options after the . are unknown",
    "redis://:canary@one:26379,two:26379/mymaster": "redis\\+sentinel://",
    "redis+sentinel://:canary@one:26379,two:26379": "name of the service is missing",
    "redis+sentinel://:canary@one:26379,two:26379//0": "name of the service is missing",
    "redis+sentinel://:canary@one:26379,:26379/mymaster": "has no host",
    "redis+sentinel://:canary@one:26379,/mymaster": "has no host",
    "redis+sentinel://:canary@one:port/mymaster": "port is not a number",
    "redis+sentinel://:canary@one/mymaster/first": "the database",
    "redis+sentinel://:canary@one/mymaster/0?sentinel_passwort=canary": "options after the . are unknown",
}


@pytest.mark.parametrize("url", WRONG)
def test_what_is_wrong_is_said_and_no_secret(url: str) -> None:
    with pytest.raises(InvalidInput, match=WRONG[url]) as refused:
        parse_redis_url(url)
    assert refused.value.code == "bad_redis_url"
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:canary@there", "there:6379"),
        ("rediss://me:canary@there:6380/3?ssl_ca_certs=/ca.crt", "there:6380/3"),
        ("redis://[::1]:7000/0", "::1:7000/0"),
        ("redis+sentinel://:canary@one,two:1/mymaster", "mymaster/0 of the Sentinels at one,two:1"),
    ],
)
def test_the_address_for_logs_has_no_secret(url: str, address: str) -> None:
    assert parse_redis_url(url).address == address


def test_sentinels_of_which_one_has_an_ipv6_address_are_read_by_newer_pythons_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strict(url: str) -> SplitResult:
        if "," in url and "[" in url:
            raise ValueError("Invalid IPv6 URL")
        return urlsplit(url)

    monkeypatch.setattr(redis_client, "urlsplit", strict)
    place = parse_redis_url("redis+sentinel://:canary@one,[::1],[::2]:7/mymaster/1")
    assert place.sentinels == (("one", 26379), ("::1", 26379), ("::2", 7))


def test_the_servers_and_the_sentinels_have_their_own_secrets_and_share_tls() -> None:
    place = parse_redis_url(
        "rediss+sentinel://me:a%2Fb@one,[::1]:7/my%20master/2"
        "?sentinel_user=you&sentinel_password=c%26d&ssl_ca_certs=/ca.crt&socket_timeout=3"
    )

    assert place.sentinels == (("one", 26379), ("::1", 7))
    assert place.service == "my master"
    assert place.options == {
        **{"username": "me", "password": "a/b", "db": 2, "socket_timeout": 3.0},
        **{"ssl": True, "ssl_ca_certs": "/ca.crt"},
    }
    told = {name: place.sentinel_options[name] for name in ("username", "password", "ssl", "ssl_ca_certs")}
    assert told == {"username": "you", "password": "c&d", "ssl": True, "ssl_ca_certs": "/ca.crt"}
