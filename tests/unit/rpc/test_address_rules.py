"""Whom the platform may call on behalf of a job: a table of addresses, and of names."""

from __future__ import annotations

import pytest

from spo.errors import InvalidInput
from spo.rpc.pools import AddressRules

RULES = AddressRules.of(["Rewards.example.org", "models.example.org:8443", "[2001:4860::1]"], ["10.1.0.0/16"])


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("10.1.2.3", True),  # one of the networks
        ("10.2.0.1", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("169.254.169.254", False),  # metadata of clouds
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("172.16.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.2.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::a9fe:a9fe", False),  # NAT64 of 169.254.169.254
        ("not an address", False),
    ],
)
def test_only_public_addresses_and_those_of_named_networks_are_reached(address: str, reached: bool) -> None:
    assert RULES.reaches(address) is reached


@pytest.mark.parametrize(
    "url",
    [
        "https://rewards.example.org/score",
        "http://REWARDS.example.org:80/",
        "https://models.example.org:8443/v1",
        "https://[2001:4860::1]/",
    ],
)
def test_a_host_that_is_named_may_be_asked(url: str) -> None:
    RULES.require_named(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://rewards.example.org:8443/",
        "https://models.example.org/",
        "https://evil.example.org/",
        "https://rewards.example.org.evil.org/",
        "https://rewards.example.org@evil.org/",
        "https://user@rewards.example.org/",
        "file:///etc/passwd",
        "gopher://rewards.example.org/",
        "//rewards.example.org/",
        "https://",
        "https://rewards.example.org:99999/",
        "https://[::1/",
        "",
    ],
)
def test_any_other_address_is_refused_at_its_place(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        RULES.require_named(url, "/tasks/verifier/url")
    assert refused.value.code == "address_not_allowed"
    assert [fault.pointer for fault in refused.value.violations] == ["/tasks/verifier/url"]


def test_an_address_of_this_machine_is_told_that_it_takes_two_settings() -> None:
    for url in ("http://127.0.0.1:9000/score", "http://localhost:9000/score"):
        with pytest.raises(InvalidInput) as refused:
            RULES.require_named(url)
        (fault,) = refused.value.violations
        assert "SPO_VERIFIER_HTTP_HOSTS" in fault.message
        assert "SPO_VERIFIER_HTTP_NETWORKS" in fault.message
    with pytest.raises(InvalidInput) as refused:
        RULES.require_named("https://evil.example.org/")
    assert "NETWORKS" not in refused.value.violations[0].message


def test_what_is_no_network_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidInput, match="not a network"):
        AddressRules.of([], ["10.0.0.1/8/9"])
