"""A folder as a tar archive and back: exact for any cut, whole or absent, and nothing outside of the folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from spo.client.models import ReceivedFolder
from spo.errors import IntegrityError, InvalidInput, SpoError, Unreachable
from spo.weights.model_folders import BYTES_PER_READ, open_members, tar_bytes, tar_pieces

CONTENT = {"config.json": b"{}", "empty": b"", "model.safetensors": bytes(range(256)) * 9001, "exact": bytes(1024)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name, content in CONTENT.items():
        (made / name).write_bytes(content)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_archive_is_one_of_tars_and_as_long_as_promised(folder: Path) -> None:
    members = open_members(folder)
    pieces = list(tar_pieces(members))

    assert sum(map(len, pieces)) == tar_bytes(members)
    assert max(map(len, pieces)) <= BYTES_PER_READ
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        found = {each.name: archive.extractfile(each) for each in archive}
        assert {name: stream and stream.read() for name, stream in found.items()} == CONTENT


def test_opened_files_are_sent_although_their_folder_is_gone(folder: Path, tmp_path: Path) -> None:
    members = open_members(folder)
    for path in folder.iterdir():
        path.unlink()

    with ReceivedFolder(tmp_path / "got") as receiving:
        for piece in tar_pieces(members):
            receiving.take(piece)

    assert contents(tmp_path / "got") == CONTENT


@pytest.mark.parametrize("size", [1023, 511, 512, 513, 100_000, 10_000_000])
def test_it_arrives_in_pieces_of_any_size(folder: Path, tmp_path: Path, size: int) -> None:
    whole = b"".join(tar_pieces(open_members(folder)))

    with ReceivedFolder(tmp_path / "a" / "got") as receiving:
        for start in range(0, len(whole), size):
            receiving.take(whole[start : start + size])

    assert contents(tmp_path / "a" / "got") == CONTENT
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["got"]


@pytest.mark.parametrize("share", [0, 0.3, 0.999])
def test_what_broke_off_leaves_nothing(folder: Path, tmp_path: Path, share: float) -> None:
    whole = b"".join(tar_pieces(open_members(folder)))

    with pytest.raises(Unreachable, match="broke off"), ReceivedFolder(tmp_path / "got") as receiving:
        receiving.take(whole[: int(share * len(whole))])

    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_there_stays_as_it_is(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="is there already"), ReceivedFolder(folder):
        pass

    assert contents(folder) == CONTENT


def hostile(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    "archive",
    [
        hostile("../out"),
        hostile("/tmp/out"),
        hostile("a/b"),
        hostile("link", tarfile.SYMTYPE),
        hostile("link", tarfile.LNKTYPE),
        hostile("folder", tarfile.DIRTYPE),
        hostile(".hidden"),
        hostile(".."),
        hostile("pipe", tarfile.FIFOTYPE),
        b"x" * 2048,
    ],
)
def test_an_archive_that_reaches_elsewhere_is_refused(tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(IntegrityError), ReceivedFolder(tmp_path / "got") as receiving:
        receiving.take(archive)

    assert list(tmp_path.iterdir()) == []


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoError), ReceivedFolder(tmp_path / "got") as receiving:
        receiving.take(hostile("a")[:512] * 2 + bytes(1024))

    assert list(tmp_path.iterdir()) == []
