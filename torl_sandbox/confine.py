"""How a process gives up its powers for good: limits, user, capabilities, files (Landlock), system calls (seccomp)."""

import ctypes
import os
import resource
import signal
import struct

import program
import seccomp

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
NEW_NAMESPACE = {"mount": 0x00020000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000}
MS_RDONLY, MS_NOSUID, MS_NODEV, MNT_DETACH = 1, 2, 4, 2
CAPSET = {"x86_64": 126, "aarch64": 91}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every processor
READ_FILE, READ_DIR, EXECUTE, WRITE_FILE, TRUNCATE = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def check(result, what):
    """Raise OSError when a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option, value):
    check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def enter_namespaces(names):
    """Move this process into new namespaces; its children for "pid". With "user", its user and group stay."""
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(sum(NEW_NAMESPACE[name] for name in names)), "unshare")
    if "user" in names:
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for file, text in maps.items():  # in this order
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)


def mount_private(folder, size_mb):
    """An empty file system in memory on `folder`; of size 0, it stays empty."""
    options = f"size={max(size_mb, 1)}m,nr_inodes=16384,mode=1777".encode()
    flags = MS_NOSUID | MS_NODEV | (0 if size_mb else MS_RDONLY)
    check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), f"mount {folder}")


def unmount(folder):
    check(libc.umount2(folder.encode(), MNT_DETACH), f"unmount {folder}")


def landlock_rules(readable, writable):
    """A descriptor of rules: `readable` paths can be read and run, `writable` ones changed, nothing else opened.

    Raises `seccomp.Unsupported` where the kernel has no Landlock.
    """
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        raise seccomp.Unsupported("the kernel has no Landlock")
    rights = (1 << min(12 + abi, 15)) - 1  # for files: 13, and one more in each of the next two versions
    attributes = (ctypes.c_uint64 * 3)(rights, 0, SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0)
    rules = check(libc.syscall(LANDLOCK_CREATE, attributes, 24 if abi >= 6 else 8, 0), "landlock")
    for paths, allowed in ((readable, READ_FILE | READ_DIR | EXECUTE), (writable, rights)):
        for path in paths:
            if os.path.exists(path):
                of_files = READ_FILE | WRITE_FILE | EXECUTE | TRUNCATE
                parent = os.open(path, os.O_PATH)
                rule = struct.pack("<Qi", allowed if os.path.isdir(path) else allowed & of_files, parent)
                check(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"landlock {path}")
                os.close(parent)
    return rules


class Confinement:
    """What a program's process is put under, as far as it can be prepared once. `apply` is called in that process.

    Without `uid` the user stays, without capabilities. `rules` are Landlock's; with them the filter of calls is that
    for where there is no namespace.
    """

    def __init__(self, rlimits, uid=None, rules=None):
        self.rlimits = [(getattr(resource, name), value) for name, value in rlimits.items()]
        self.uid = uid
        self.rules = rules
        self.filter = seccomp.build(None if rules is None else seccomp.SOME_PID)

    def apply(self):
        for limit, value in self.rlimits:
            program.set_limit(limit, value)
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
        else:
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
            check(libc.syscall(CAPSET[os.uname().machine], header, (ctypes.c_uint32 * 6)()), "capset")  # to none
        prctl(PR_SET_DUMPABLE, 0)  # a crash is not the business of the host's collector of crashes
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not earlier: a change of the user undoes it
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if self.rules is not None:
            check(libc.syscall(LANDLOCK_RESTRICT, self.rules, 0), "landlock")
        seccomp.install(libc, self.filter)
