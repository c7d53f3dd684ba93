"""Isolation tiers: how a zygote is started in each, strongest first. What works is found out by trying."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import services.sandbox_judge
from services.sandbox_judge.isolation.seccomp_filter import OWN_PID, Freedom, base_filter, narrowing_filter
from services.sandbox_judge.languages import readable_folders
from services.sandbox_judge.settings import IsolationTier

TIERS: tuple[IsolationTier, ...] = get_args(IsolationTier)

# Programs of worker n run as this user id plus n when the judge is root.
FIRST_PROGRAM_UID = 61000
_CAP_DAC_READ_SEARCH = 1 << 2
_JUDGE_SIDE = "/judge"
# What lies below these outside would be hidden inside: it is bound elsewhere there.
_COVERED = ("/tmp", "/proc", "/dev", _JUDGE_SIDE)
_ELSEWHERE = f"{_JUDGE_SIDE}/outside"
_JAIL = Path("services", "sandbox_judge", "jail")
_OPTIONS = ("-s", "-S", "-B", "-c")
_BOOT = "sys.path.insert(0, sys.argv[1]); from services.sandbox_judge.jail import zygote; zygote.main()"
_PACKAGES = ("site-packages", "dist-packages")
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    # One hash seed for all: a program's verdict must not depend on the order of a set.
    "PYTHONHASHSEED": "0",
    # Libraries that were imported before a fork must not have started threads, and pytest has no use for plugins here.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


@dataclass(frozen=True)
class Launch:
    """How to start one zygote and what to tell it first."""

    command: tuple[str, ...]
    environment: dict[str, str]
    setting: dict[str, object]
    # Folders that lie elsewhere inside: (outside, inside).
    moved: tuple[tuple[str, str], ...] = ()

    def inside(self, text: str) -> str:
        """A word of a command, with the paths that it has inside."""
        for outside, inside in self.moved:
            text = text.replace(outside, inside)
        return text


@dataclass(frozen=True)
class Preload:
    """What a zygote is for beside programs: the module of the jail that its children run, and what it imports first.

    It reads this environment's packages.
    """

    harness: str
    imports: tuple[str, ...] = ()
    # Whether the harness does before the first fork what every fork would do anew.
    rehearsed: bool = True


def program_uid(worker: int) -> int | None:
    """The user that programs of a worker run as; None: the judge's own, because it is not root."""
    return FIRST_PROGRAM_UID + worker if os.geteuid() == 0 else None


def launch(tier: IsolationTier, worker: int, scratch: str | None = None, preload: Preload | None = None) -> Launch:
    """The way to start a zygote of a worker on this machine; tiers with namespaces bring their own scratch.

    Raises NotReady when seccomp filters cannot be built.
    """
    namespaces = tier.startswith("namespaces")
    source_root = _JUDGE_SIDE if namespaces else str(_source_root())
    root = os.geteuid() == 0
    bound = {folder: inside(folder) if namespaces else folder for folder in _outside_usr(preload)}
    python = (bound_path(_interpreter(), bound), *_OPTIONS, f"import sys; {_BOOT}", source_root)
    moved = tuple((outside, place) for outside, place in bound.items() if outside != place)
    return Launch(
        command=(*_bubblewrap(bound, root=root), *python) if namespaces else python,
        environment=_ENVIRONMENT | (_libraries_of_interpreter(bound) if moved else {}),
        moved=moved,
        setting=_setting(
            preload,
            namespaces=namespaces,
            landlock=tier.endswith("landlock"),
            scratch="/tmp" if namespaces else scratch,
            bound=bound,
        )
        | {
            "uid": program_uid(worker),
            "capabilities": 0
            if namespaces or not root or _open_to_all(_prefix(), *map(Path, package_folders() if preload else ()))
            else _CAP_DAC_READ_SEARCH,
        },
    )


def container_launch(python: str, preload: Preload | None = None) -> Launch:
    """The way to start a zygote in a container that has the folder of the control socket at /judge.

    Raises NotReady when seccomp filters cannot be built.
    """
    connect = (
        "import socket, sys; link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"link.connect({_JUDGE_SIDE + '/control'!r}); sys.argv.append(str(link.detach())); "
    )
    return Launch(
        command=(python, *_OPTIONS, connect + _BOOT, _JUDGE_SIDE),
        environment=_ENVIRONMENT,
        setting=_setting(preload, namespaces=False, landlock=True, scratch="/tmp", bound={})
        | {"uid": None, "capabilities": 0},
    )


def jail_sources() -> Path:
    """The folder of the modules that run inside."""
    return _source_root() / _JAIL


def _setting(
    preload: Preload | None, *, namespaces: bool, landlock: bool, scratch: str | None, bound: dict[str, str]
) -> dict[str, object]:
    """What a zygote is told first; bound: where folders outside /usr lie for it, where that is elsewhere."""
    outside = _outside_usr(preload)
    return {
        "namespaces": namespaces,
        "landlock": landlock,
        "readable": [
            "/usr",
            *_SYSTEM_FOLDERS,
            "/etc/ld.so.cache",
            "/etc/alternatives",
            *(bound.get(folder, folder) for folder in outside),
        ],
        "harness": preload.harness if preload else "",
        "rehearsed": bool(preload and preload.rehearsed),
        "imports": preload.imports if preload else (),
        "packages": tuple(bound.get(folder, folder) for folder in package_folders()) if preload else (),
        "scratch": scratch,
        "base_filter": base_filter(),
        "filters": {freedom.value: narrowing_filter(freedom, namespaces=namespaces) for freedom in Freedom},
        "own_pid_marker": struct.pack("=I", OWN_PID),
    }


def inside(folder: str) -> str:
    """Where a folder lies in a jail with mounts of its own."""
    return _ELSEWHERE + folder if any(Path(folder).is_relative_to(covered) for covered in _COVERED) else folder


def bound_path(path: str, bound: dict[str, str]) -> str:
    """A path below one of the bound folders, as it is inside."""
    for outside, place in bound.items():
        if Path(path).is_relative_to(outside):
            return place + path.removeprefix(outside)
    return path


def _libraries_of_interpreter(bound: dict[str, str]) -> dict[str, str]:
    """Where an interpreter finds its shared library when it is not where it was built for."""
    folder, prefix = str(sysconfig.get_config_var("LIBDIR") or ""), str(_prefix())
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or bound.get(prefix, prefix) == prefix:
        return {}
    return {
        "LD_LIBRARY_PATH": bound_path(folder, bound) if Path(folder).is_relative_to(prefix) else bound[prefix] + "/lib"
    }


def _bubblewrap(bound: dict[str, str], *, root: bool) -> tuple[str, ...]:
    arguments = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if root:
        # A real user id instead of a mapped root: the zygote drops to it with these two capabilities, then loses them.
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--cap-drop", "ALL"]
    # Bubblewrap would give the folders above a bind the modes they have outside: /root, say, closed to the program.
    parents = {parent for place in bound.values() for parent in Path(place).parents[:-1]}
    for parent in sorted(parents):
        arguments += ["--perms", "0755", "--dir", str(parent)]
    for folder, place in {"/usr": "/usr", **bound}.items():
        arguments += ["--ro-bind", folder, place]
    for name in _SYSTEM_FOLDERS:
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.exists(name):
            arguments += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        arguments += ["--ro-bind-try", name, name]
    arguments += ["--ro-bind", str(jail_sources()), f"{_JUDGE_SIDE}/{_JAIL}"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return (*arguments, "--chdir", "/", "--")


def _interpreter() -> str:
    """The real binary: a virtual environment's link or a version manager's shim would be slower or not in the jail."""
    return os.path.realpath(sys.executable)


def package_folders() -> tuple[str, ...]:
    """Where this environment's packages lie: its own, the user's and the system's where it sees them."""
    paths = sysconfig.get_paths()
    found = [paths["purelib"], paths["platlib"], *(path for path in sys.path if Path(path).name in _PACKAGES)]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in found if os.path.isdir(path)))


def _outside_usr(preload: Preload | None) -> tuple[str, ...]:
    """What programs may read beside the system: this interpreter, the languages of other places, packages."""
    return (str(_prefix()), *readable_folders(), *(package_folders() if preload else ()))


def _prefix() -> Path:
    return Path(os.path.realpath(sysconfig.get_paths()["stdlib"])).parent.parent


def _source_root() -> Path:
    return Path(next(iter(services.sandbox_judge.__path__))).parent.parent


def _open_to_all(*paths: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for path in paths for folder in (path, *path.parents))
