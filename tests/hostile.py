"""The hostile set: programs that try to get out, to stay, to reach the next call, to harm the server or the machine.

Every program runs after `PRELUDE`. It says ESCAPED where something worked that must not, and `done` where it must
reach its end. `HOST` names what is there to be attacked. The system calls are those of x86-64.
"""

from dataclasses import dataclass

PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, HOST['name'].encode(), 0, 0, 0)  # by which the test finds what is left of us
def syscall(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(
        ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt(what, action):
    try:
        result = action()
    except (OSError, ValueError, OverflowError, ImportError, RuntimeError, MemoryError):
        return
    print('ESCAPED', what, repr(result)[:300], flush=True)
def fork():
    try:
        return os.fork()
    except OSError:  # tier none
        return None
"""
"""Starts each program, after the definition of `HOST`."""


@dataclass(frozen=True)
class Hostile:
    """A program and what must be true of its result. The rest, which is true of all, is in test_hostile.py."""

    name: str
    code: str
    ends: tuple[str, ...] = ("ok",)
    """The statuses that it may end with."""
    ends_none: tuple[str, ...] = ()
    """In tier none, if others."""
    afterwards: str = ""
    """The next program in the same slot: it must print `clean`."""
    plain: bool = False
    """Whether tier plain promises the same."""


_ALL = [
    # Time
    Hostile("loops", "while True: pass", ("timeout",), plain=True),
    Hostile("sleeps", "time.sleep(60)", ("timeout",), plain=True),
    Hostile(
        "ignores every signal",
        """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
        ("timeout",),
        plain=True,
    ),
    Hostile("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), plain=True),
    Hostile("stops its process group", "os.kill(0, signal.SIGSTOP)", ("timeout",), ("error",)),
    Hostile("kills its process group", "os.kill(0, signal.SIGKILL)", ("killed",), ("error",), plain=True),
    Hostile(
        "kills the process group of its slot",
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for group in (1, os.getpgid(os.getppid())):
    try: os.setpgid(0, group)
    except OSError: continue
    for number in (signal.SIGTERM, signal.SIGKILL):
        try: os.kill(0, number)
        except OSError: pass
print('done')
""",
        ("killed",),
        ("ok",),
    ),
    Hostile(
        "ends its process group",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(0, signal.SIGTERM)\nprint('done')",
        ends_none=("error",),
        plain=True,
    ),
    Hostile(
        "becomes another program",
        "os.execv('/bin/sh', ['sh', '-c', 'trap \"\" TERM INT HUP; while :; do :; done'])",
        ("timeout",),
        plain=True,
    ),
    Hostile(
        "threads without end that are not daemons",
        """
import threading
for _ in range(5): threading.Thread(target=time.sleep, args=(1000,)).start()
""",
        ("timeout",),
        plain=True,
    ),
    Hostile(
        "exit hooks that do not end",
        "import atexit\natexit.register(lambda: time.sleep(1000))",
        ("timeout",),
        plain=True,
    ),
    Hostile(
        "a flush that does not end",
        "class Out:\n  def write(self, text): return 0\n  def flush(self): time.sleep(1000)\nsys.stdout = Out()",
        ("timeout",),
        plain=True,
    ),
    Hostile("a destructor that does not end", "class A:\n  def __del__(self): time.sleep(1000)\na = A()", plain=True),
    Hostile(
        "exit hooks that fail, start and exit",
        """
import atexit, threading
threading.excepthook = lambda *_: 1 / 0
sys.excepthook = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=lambda: 1 / 0).start()
atexit.register(sys.exit, 7)
atexit.register(lambda: fork() == 0 and time.sleep(1000))
atexit.register(lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start())
print('done')
""",
        ("ok", "error", "killed"),
    ),
    Hostile("a timer's signal", "signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(10)", ("killed",), plain=True),
    Hostile(
        "CPU time in several threads",
        """
import hashlib, threading
data = bytes(1 << 24)
def burn():
    while True: hashlib.sha256(data)
for _ in range(4): threading.Thread(target=burn).start()
""",
        ("timeout",),
        plain=True,
    ),
    # How it ends
    Hostile("exit codes", "sys.exit(256 + 3)", ("error",), plain=True),
    Hostile("leaves at once", "os._exit(5)", ("error",), plain=True),
    Hostile("leaves through C", "libc._exit(6)", ("error",), plain=True),
    Hostile("crashes", "ctypes.string_at(0)", ("killed",), "", "print(os.listdir() or 'clean')", plain=True),
    Hostile("aborts", "os.abort()", ("killed",), plain=True),
    Hostile("closes every descriptor", "os.closerange(0, 1 << 20)", ("ok", "error"), plain=True),
    Hostile(
        "the way out is blocked",
        """
import threading, program
os._exit = sys.exit = os.kill = os.execv = lambda *_: print('still here')
threading._shutdown = program.execute = program.run = None
""",
        ("ok", "error", "killed"),
    ),
    Hostile(
        "a recursion in C",
        "sys.setrecursionlimit(2**31 - 1)\nclass A:\n  def __getattr__(self, name): return getattr(self, name)\nA().x",
        ("killed", "memory", "error"),
        plain=True,
    ),
    Hostile(
        "a deep object",
        "x = []\nfor _ in range(200_000): x = [x]\ntry: repr(x)\nexcept RecursionError: del x; print('done')",
        plain=True,
    ),
    # Text
    Hostile("a flood of text", "while True: os.write(1, b'x' * 65536)", ("output_limit",), plain=True),
    Hostile("a flood of errors", "while True: os.write(2, b'x' * 65536)", ("output_limit",), plain=True),
    Hostile("a flood of broken bytes", "while True: os.write(1, b'\\xff\\xf0\\x9f')", ("output_limit",), plain=True),
    Hostile(
        "broken text",
        r"""
os.write(1, b'\xff\xfe\x00\x1b[2J\r\x08\xc3')
os.write(2, b'\xed\xa0\x80\xf0\x9f')
print('\ud800', chr(0), '\ufeff')
print('done')
""",
        plain=True,
    ),
    Hostile("standard input", "attempt('input', input) if sys.stdin.read() == '' else 1\nprint('done')", ("error",)),
    Hostile(
        "a pipe that is made larger and filled",
        "import fcntl\nfcntl.fcntl(1, 1031, 1 << 20); os.set_blocking(1, False)\n"
        "while True:\n  try: os.write(1, b'x' * (1 << 20))\n  except BlockingIOError: pass",
        ("output_limit",),
        plain=True,
    ),
    Hostile(
        "a child keeps the pipes",
        """
if fork() == 0:
    os.setsid()
    time.sleep(1000)
print('done')
""",
        plain=True,
    ),
    Hostile(
        "false results on every descriptor",
        r"""
import json, struct
data = json.dumps({'status': 'ok', 'stdout': 'false', 'stderr': '', 'seconds': 0.0, 'truncated': False}).encode()
for fd in range(3, 300):
    for text in (struct.pack('<I', len(data)) + data, b'{"missing": []}\n', b'!'):
        attempt(f'write to {fd}', lambda: os.write(fd, text))
os.write(1, struct.pack('<I', len(data)) + data)
print('\ndone')
""",
    ),
    Hostile(
        "open descriptors",
        "for fd in range(3, 4096): attempt(f'descriptor {fd}', lambda: os.fstat(fd))\nprint('done')",
    ),
    Hostile(
        "standard input is written to, locked and made strange",
        """
import fcntl
for action in (
    lambda: os.write(0, b'x'), lambda: os.set_blocking(0, False),
    lambda: fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB),
    lambda: fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_ASYNC), lambda: os.ftruncate(0, 0),
):
    try: action()
    except OSError: pass
print('done')
""",
        afterwards="""
import fcntl
fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
print('clean' if sys.stdin.read() == '' and os.get_blocking(0) else 'left')
""",
    ),
    # Memory and other limits
    Hostile("memory", "x = []\nwhile True: x.append(bytearray(1 << 24))", ("memory",), plain=True),
    Hostile("memory at once", "bytearray(1 << 40)", ("memory",), plain=True),
    Hostile(
        "memory in many processes",
        """
for _ in range(8):
    if fork() == 0:
        x = bytearray(200 << 20)
        for page in range(0, len(x), 4096): x[page] = 1
        time.sleep(1000)
time.sleep(1000)
""",
        ("memory",),
        ("timeout",),
    ),
    Hostile(
        "shared memory that outlives the process that wrote it",
        """
import mmap
attempt('anonymous', lambda: mmap.mmap(-1, 4096))
attempt('validated', lambda: mmap.mmap(-1, 4096, flags=3 | mmap.MAP_ANONYMOUS))
attempt('/dev/zero', lambda: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096))
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print('done')
""",
    ),
    Hostile("memfd", "attempt('memfd', lambda: os.memfd_create('x'))\nprint('done')"),
    Hostile(
        "memory in the kernel: pipes, sockets, events",
        """
import fcntl, select
kept = []
def more():
    a, b = os.pipe()
    kept.append((a, b))
    try: fcntl.fcntl(b, 1031, 1 << 20)
    except OSError: pass
    os.set_blocking(b, False)
    while True: os.write(b, bytes(1 << 16))
def pair():
    a, b = socket.socketpair()
    kept.append((a, b))
    b.setblocking(False)
    a.setblocking(False)
    while True: a.send(bytes(1 << 16))
for make in (more, pair, select.epoll):
    for _ in range(300):
        try: kept.append(make())
        except OSError: pass
print('done')
""",
        plain=True,
    ),
    Hostile(
        "limits that are raised",
        """
import resource
limits = [value for name, value in vars(resource).items() if name.startswith('RLIMIT_')]
infinite = []
for limit in limits:
    soft, hard = resource.getrlimit(limit)
    if hard != -1:
        attempt(limit, lambda: resource.setrlimit(limit, (hard + 1, hard + 1)))
        attempt(limit, lambda: resource.setrlimit(limit, (-1, -1)))
        attempt(limit, lambda: resource.prlimit(os.getppid(), limit, (soft, hard)))
    resource.setrlimit(limit, (hard, hard))
for name in 'CPU AS FSIZE NOFILE NPROC CORE'.split():
    if resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[1] == -1: print('ESCAPED', name)
print('done')
""",
    ),
    Hostile(
        "limits of the slot",
        """
import resource
for pid in (1, os.getppid(), HOST['victim'], HOST['pid']):
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
        attempt(pid, lambda: resource.prlimit(pid, limit, (3, 3)))
    attempt('setpriority', lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt('affinity', lambda: os.sched_setaffinity(pid, {0}))
    attempt('scheduler', lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)))
print('done')
""",
        afterwards="import threading; threading.Thread(target=print, args=('clean',)).start()",
    ),
    Hostile(
        "priorities",
        """
attempt('nice', lambda: os.nice(-5))
attempt('own user', lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt('group', lambda: os.setpriority(os.PRIO_PGRP, 0, 19))
attempt('real time', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt('ioprio', lambda: syscall(251, 3, os.getuid(), 3 << 13))
print('done')
""",
        afterwards="print(os.getpriority(os.PRIO_PROCESS, 0) == HOST['nice'] and 'clean')",
    ),
    Hostile("a file that is too large", "open('f', 'wb').write(bytes(32 << 20))", ("error",), plain=True),
    Hostile(
        "a full folder",
        """
for place in ('.', '/dev/shm'):
    try:
        for n in range(40):
            with open(f'{place}/{n}', 'wb') as file: file.write(bytes(3 << 20))
    except OSError as error: print(error)
print('done')
""",
        afterwards="open('f', 'wb').write(bytes(1 << 20))\nprint(os.listdir() == ['f'] and 'clean')",
    ),
    # Files
    Hostile(
        "files of ours",
        """
for path in HOST['secrets'] + [
    '/etc/passwd', '/etc/shadow', '/root/.bashrc', '/etc/hostname', '/proc/1/environ', '/proc/self/environ',
    '/proc/self/mem', f"/proc/{HOST['pid']}/environ", f"/proc/{os.getppid()}/mem", '/proc/self/maps',
    '/proc/kallsyms', '/proc/mounts',
    '/proc/sys/kernel/core_pattern', '/sys/kernel/mm', '/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/fuse',
    '/dev/kvm', '/dev/net/tun', '/var/log/dpkg.log', '/run/docker.sock', '/boot',
]:
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | 3):
        attempt(path, lambda: os.open(path, flags))
for path in (HOST['folder'], '/home', '/proc/self/fd', '/sys', '/var', '/run', '/root/.ssh', '/root/.cache'):
    attempt(path, lambda: os.listdir(path))
if os.path.isdir('/proc') and os.access('/proc', os.R_OK):
    try:
        if os.listdir('/proc'): print('ESCAPED /proc')
    except OSError: pass
print('done')
""",
    ),
    Hostile(
        "files of ours by way of a path descriptor",
        """
def read(path):
    handle = os.open(path, os.O_PATH)
    return os.open(f'/proc/self/fd/{handle}', os.O_RDONLY)
def below(path):
    handle = os.open(os.path.dirname(path), os.O_PATH)
    return os.open(os.path.basename(path), os.O_RDONLY, dir_fd=handle)
for path in HOST['secrets']:
    attempt(path, lambda: read(path))
    attempt(path, lambda: below(path))
    attempt('handle', lambda: syscall(303, -100, path.encode(), ctypes.create_string_buffer(200), ctypes.byref(
        ctypes.c_int()), 0))
print('done')
""",
    ),
    Hostile(
        "variables of ours",
        """
libc.getenv.restype = ctypes.c_char_p
for name in (b'HF_TOKEN', b'WANDB_API_KEY', b'E2B_API_KEY', b'LD_PRELOAD'):
    if libc.getenv(name): print('ESCAPED', name)
print(dict(os.environ), sys.argv, sys.orig_argv)
place = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
for n in range(1000):
    if place[n] is None: break
    print(place[n])
print('done')
""",
    ),
    Hostile(
        "modes, owners, times and attributes of files of ours",
        """
import shutil
for path in HOST['secrets'] + [HOST['folder']]:
    for action in (
        lambda: os.chmod(path, 0o777), lambda: os.chown(path, os.getuid(), -1), lambda: os.utime(path, (1, 1)),
        lambda: os.setxattr(path, 'user.x', b'x'), lambda: os.truncate(path, 0), lambda: os.rename(path, path + '2'),
        lambda: os.unlink(path), lambda: os.link(path, 'link'), lambda: os.symlink('x', path + '3'),
        lambda: os.mkdir(path + '4'), lambda: os.mkfifo(path + '5'), lambda: shutil.rmtree(path),
        lambda: syscall(90, path.encode(), 0o777), lambda: syscall(452, -100, path.encode(), 0o777, 0),
        lambda: syscall(132, path.encode(), None), lambda: syscall(437, -100, path.encode(), bytes(24), 24),
    ):
        try: action()
        except OSError: pass
for name in sys.path + ['/usr/lib', '/torl']:  # readable, and perhaps of our user
    try:
        folder = os.open(name, os.O_RDONLY)
        for file in (folder, os.open(sorted(os.listdir(name))[-1], os.O_RDONLY, dir_fd=folder)):
            before = os.fstat(file)
            for action in (lambda: os.fchmod(file, 0o700), lambda: os.utime(file, (1, 1)), lambda: os.fchown(
                file, os.getuid(), -1), lambda: os.setxattr(file, 'user.x', b'x'), lambda: os.ftruncate(file, 0)):
                try: action()
                except OSError: pass
            if name and os.fstat(file)[:7] + os.fstat(file)[8:] != before[:7] + before[8:]: print('ESCAPED', name)
    except OSError: pass
print('done')
""",
    ),
    Hostile(
        "writes where nothing may be written",
        """
for folder in ['/', '/etc', '/dev', '/proc', '/packages', '/torl', '/usr', '/usr/lib', '/usr/local/bin', '/var/tmp',
               '/run', HOST['folder']] + [path for path in sys.path if path]:
    attempt(folder, lambda: open(folder + '/left', 'w'))
    attempt(folder, lambda: os.mkdir(folder + '/left.d'))
print('done')
""",
        afterwards="print(any(map(os.path.exists, ('/left', '/etc/left', '/dev/left', '/proc/left'))) or 'clean')",
    ),
    Hostile(
        "what is left in its folder",
        """
import pathlib
for n in range(500): pathlib.Path(f'file{n}').touch()
for name in ('-rf', '--no-preserve-root', '*', 'new\\nline', 'x' * 255, '\\udcff', ' ', '..x'):
    pathlib.Path(name).touch()
os.symlink('/etc', 'link'), os.symlink('loop', 'loop'), os.symlink('.', 'self'), os.mkfifo('fifo')
os.symlink(HOST['folder'], 'host')
with open('sparse', 'wb') as file: file.truncate(3 << 20)
os.mkdir('closed'), os.mkdir('closed/below'), os.chmod('closed/below', 0), os.chmod('closed', 0)
for _ in range(1100):
    os.mkdir('deep')
    os.chdir('deep')
os.chmod('.', 0)
print('done')
""",
        afterwards="print(os.listdir() or oct(os.stat('.').st_mode & 0o700) == '0o700' and 'clean')",
        plain=True,
    ),
    Hostile(
        "a closed folder",
        "os.chmod(os.getcwd(), 0)\nprint('done')",
        ("ok", "error"),
        afterwards="open('f', 'w')\nprint('clean')",
        plain=True,
    ),
    Hostile(
        "attributes and times of its folder",
        """
for folder in (os.getcwd(), '/dev/shm', '/proc', '/dev', '/'):
    for action in (lambda: os.setxattr(folder, 'user.left', b'x'), lambda: os.utime(folder, (5, 5))):
        try: action()
        except OSError: pass
print('done')
""",
        afterwards="""
seen = [os.stat(folder).st_mtime for folder in (os.getcwd(), '/dev', '/proc', '/') if os.path.exists(folder)]
print('left' if 5 in seen or os.listxattr('.') else 'clean')
""",
    ),
    Hostile(
        "its folder is gone",
        "import shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nprint('done')",
        afterwards="open('f', 'w')\nprint('clean')",
        plain=True,
    ),
    Hostile(
        "everything is removed",
        """
import shutil
shutil.rmtree(HOST['folder'], ignore_errors=True)
if os.getcwd() == '/tmp':  # namespaces
    for folder in ('/tmp', '/dev', '/etc', '/packages', '/torl'): shutil.rmtree(folder, ignore_errors=True)
print('done')
""",
        afterwards="import xml.dom.minidom, numpy.polynomial; open('f', 'w')\nprint('clean')",
    ),
    # Processes and signals
    Hostile("a fork bomb", "while True: fork()", ("timeout", "killed")),
    Hostile(
        "a fork bomb that does not wait",
        "def bomb():\n  while True:\n    if fork() == 0: os.setsid(); bomb()\nbomb()",
        ("timeout", "killed"),
    ),
    Hostile(
        "more processes than allowed",
        """
count = 0
while count < 300:
    pid = fork()
    if pid is None: break
    if pid == 0: time.sleep(1000)
    count += 1
if count > 70: print('ESCAPED', count)
time.sleep(0.3)
print('done')
""",
        ("ok", "killed", "timeout"),  # killed by us, where the kernel sets no limit: in tier user as root
    ),
    Hostile(
        "threads without end",
        """
import threading
threading.stack_size(65536)
try:
    while True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except (RuntimeError, MemoryError): pass
print('done')
""",
        ("ok", "timeout", "memory", "error"),
    ),
    Hostile(
        "a daemon",
        """
if fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 300)
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(1000)
    os._exit(0)
time.sleep(0.1)
print('done')
""",
    ),
    Hostile(
        "a daemon below a reaper of its own",
        """
libc.prctl(36, 1, 0, 0, 0)
if fork() == 0:
    libc.prctl(36, 1, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
        while True: time.sleep(1)
    os._exit(0)
print('done')
""",
    ),
    Hostile(
        "children that end and begin anew",
        """
if fork() == 0:
    while True:
        if os.fork(): os._exit(0)
        os.setsid()
print('done')
""",
    ),
    Hostile(
        "a child that vfork stops",
        "os.posix_spawn('/bin/sleep', ['sleep', '1000'], {}) if fork() is not None else 1\nprint('done')",
    ),
    Hostile(
        "signals to others",
        """
for number in (0, signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL):
    for pid in (HOST['victim'], HOST['pid'], HOST['server'], -HOST['server'], -HOST['victim']):
        attempt(f'kill {pid} {number}', lambda: os.kill(pid, number))
        attempt('tkill', lambda: syscall(200, pid, number))
        attempt('tgkill', lambda: syscall(234, pid, pid, number))
        attempt('sigqueue', lambda: syscall(129, pid, number, bytes(128)))
    attempt('pidfd', lambda: syscall(424, os.pidfd_open(HOST['victim']), number, None, 0))
print('done')
""",
    ),
    Hostile(
        "signals to all",
        """
try:
    os.kill(HOST['victim'], 0)
except OSError:  # else this would end more than the test
    for pid in (-1, *range(1, 400)):
        if pid != os.getpid():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGKILL):
                try: os.kill(pid, number)
                except OSError: pass
print('done')
""",
    ),
    Hostile(
        "signals to the slot",
        """
for number in range(1, 65):
    for pid in (1, os.getppid()):
        if number not in (signal.SIGCHLD,) and pid != 0:
            try: os.kill(pid, number)
            except OSError: pass
try: syscall(424, os.pidfd_open(1), signal.SIGKILL, None, 0)
except OSError: pass
time.sleep(0.05)
print('done')
""",
    ),
    Hostile(
        "signals by way of descriptors",
        """
import fcntl, struct
for pid in (HOST['victim'], HOST['server'], os.getppid(), 1):
    for kind in (os.pipe, lambda: [end.detach() for end in socket.socketpair()]):
        reader, writer = kind()
        for action in (
            lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, pid), lambda: fcntl.fcntl(reader, 10, 9),
            lambda: fcntl.fcntl(reader, 15, struct.pack('ii', 1, pid)),
            lambda: fcntl.ioctl(reader, 0x8901, struct.pack('i', pid)),
            lambda: fcntl.ioctl(reader, 0x8902, struct.pack('i', pid)),
            lambda: fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC),
        ):
            try: action()
            except OSError: pass
        os.write(writer, b'x')
print('done')
""",
        ("ok", "killed"),
    ),
    Hostile(
        "the memory of others",
        """
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
for pid in (HOST['victim'], HOST['pid'], HOST['server'], os.getppid(), 1):
    for request in (16, 0x4206): attempt('ptrace', lambda: syscall(101, request, pid, 0, 0))
    attempt('readv', lambda: syscall(310, pid, vector, 1, vector, 1, 0))
    attempt('writev', lambda: syscall(311, pid, vector, 1, vector, 1, 0))
    attempt('kcmp', lambda: syscall(312, pid, os.getpid(), 0, 0, 0))
    attempt('robust list', lambda: syscall(274, pid, buffer, buffer))
    attempt('move_pages', lambda: syscall(279, pid, 0, None, None, None, 0))
attempt('traceme', lambda: syscall(101, 0, 0, 0, 0))
print('done')
""",
    ),
    # Powers
    Hostile(
        "namespaces and mounts",
        """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x4000000, 0x8000000, 0x2000000):
    attempt('unshare', lambda: syscall(272, flag))
    attempt('clone', lambda: syscall(56, flag | 17, 0, 0, 0, 0))
attempt('unshare', lambda: syscall(272, 0x80))
attempt('clone3', lambda: syscall(435, (ctypes.c_uint64 * 11)(0x10000000), 88))
for number, name in ((308, 'setns'), (165, 'mount'), (166, 'umount'), (155, 'pivot_root'), (161, 'chroot'),
                     (428, 'open_tree'), (430, 'fsopen'), (432, 'fsmount'), (429, 'move_mount'), (442, 'setattr'),
                     (467, 'open_tree_attr')):
    attempt(name, lambda: syscall(number, b'/tmp', b'/tmp', b'tmpfs', 0, 0))
attempt('chroot', lambda: os.chroot('.'))
for path in (b'/proc', b'/tmp', b'/dev/shm', b'/'): attempt('umount', lambda: syscall(166, path, 2))
print('done')
""",
    ),
    Hostile(
        "other users and capabilities",
        """
if libc.prctl(39, 0, 0, 0, 0) != 1: print('ESCAPED no_new_privs')
for name in ('setuid', 'setgid', 'seteuid', 'setegid'):
    for number in {0, 1, 1000} - {os.getuid()}: attempt(name, lambda: getattr(os, name)(number))
attempt('setgroups', lambda: os.setgroups([0]))
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
if any(data): print('ESCAPED capabilities', list(data))
attempt('capset', lambda: syscall(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)))
attempt('mknod', lambda: os.mknod('node', 0o20666, os.makedev(1, 1)))
attempt('personality', lambda: syscall(135, 0x0040000))
attempt('pdeathsig', lambda: syscall(157, 1, 0, 0, 0, 0))
print('done')
""",
    ),
    Hostile(
        "programs of root",
        """
import subprocess
for command in (['su', '-c', 'id -u'], ['mount', '-t', 'tmpfs', 'x', '/tmp'], ['sudo', '-n', 'id', '-u'],
                ['newuidmap'], ['unshare', '-Ur', 'id'], ['chsh'], ['ping', '-c1', '127.0.0.1']):
    try: result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1)
    except (OSError, subprocess.TimeoutExpired): continue
    if result.returncode == 0: print('ESCAPED', command, result.stdout)
print('done')
""",
    ),
    Hostile(
        "calls to the kernel that no program needs",
        """
for number, name in (
    (321, 'bpf'), (298, 'perf_event_open'), (323, 'userfaultfd'), (425, 'io_uring_setup'), (248, 'add_key'),
    (249, 'request_key'), (250, 'keyctl'), (438, 'pidfd_getfd'), (304, 'open_by_handle_at'), (300, 'fanotify'),
    (103, 'syslog'), (153, 'vhangup'), (163, 'acct'), (167, 'swapon'), (172, 'iopl'), (173, 'ioperm'),
    (154, 'modify_ldt'), (175, 'init_module'), (320, 'kexec_file_load'), (179, 'quotactl'), (440, 'madvise'),
    (256, 'migrate_pages'), (457, 'statmount'), (458, 'listmount'), (447, 'memfd_secret'),
):
    attempt(name, lambda: syscall(number, 0, 0, 0, 0, 0))
    attempt(name, lambda: syscall(number | 0x40000000, 0, 0, 0, 0, 0))
attempt('hostname', lambda: socket.sethostname('x'))
attempt('clock', lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
print('done')
""",
    ),
    Hostile(
        "system calls of 32 bits",
        r"""
import mmap
code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
code.write(b'\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3')  # getpid
place = ctypes.addressof(ctypes.c_char.from_buffer(code))
print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(place)())
""",
        ("killed",),
    ),
    Hostile(
        "system calls of x32",
        """
for number in (41, 57, 62, 101, 165, 272): attempt(number, lambda: syscall(number | 0x40000000, 1, 1, 0))
for number in (-1, 2**31, 2**32 - 1): attempt(number, lambda: syscall(number, 0, 0, 0))
print('done')
""",
    ),
    Hostile(
        "a filter of its own that allows",
        """
class Filter(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_char_p)]
libc.prctl(22, 2, ctypes.byref(Filter(1, b'\\x06\\0\\0\\0\\0\\0\\xff\\x7f')), 0, 0)
attempt('socket', socket.socket)
attempt('unshare', lambda: syscall(272, 0x10000000))
print('done')
""",
    ),
    # Others: network, sockets, objects of the kernel
    Hostile(
        "the network",
        """
for address in (('127.0.0.1', HOST['port']), ('1.1.1.1', 53), ('169.254.169.254', 80)):
    attempt(address, lambda: socket.create_connection(address, 0.3))
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', HOST['port'])))
attempt('listen', lambda: socket.create_server(('127.0.0.1', 0)))
attempt('name', lambda: socket.getaddrinfo('example.com', 80))
import urllib.request
attempt('http', lambda: urllib.request.urlopen(f"http://127.0.0.1:{HOST['port']}/", timeout=0.3))
print('done')
""",
    ),
    Hostile(
        "sockets of every family",
        """
for family in range(0, 46):
    for kind in (1, 2, 3, 5): attempt(f'socket {family} {kind}', lambda: socket.socket(family, kind))
    for kind in (1, 2, 5):
        if (family, kind) not in ((1, 1), (1, 5)): attempt(f'pair {family}', lambda: socket.socketpair(family, kind))
a, b = socket.socketpair()
b.send(b'x')
print('done' if a.recv(1) == b'x' else '')
""",
    ),
    Hostile(
        "Unix sockets of ours",
        """
for kind in (1, 2, 5):
    for address in HOST['sockets']:
        for flags in (0, 0o4000, 0o2000000):
            def reach():
                pair = socket.socketpair(socket.AF_UNIX, kind | flags)
                return pair[0].sendmsg([b'ESCAPED'], [], 0, address) if kind != 1 else pair[0].connect(address)
            if kind == 2: attempt(address, reach)
            attempt('bind', lambda: socket.socketpair(socket.AF_UNIX, kind)[0].connect(address))
print('done')
""",
    ),
    Hostile(
        "System V objects and queues",
        """
attempt('shmget', lambda: syscall(29, 0, 4096, 0o1600))
attempt('semget', lambda: syscall(64, 0, 1, 0o1600))
attempt('msgget', lambda: syscall(68, 0, 0o1600))
attempt('mq_open', lambda: syscall(240, b'x', 0o102, 0o600, None))
attempt('mq_unlink', lambda: syscall(241, HOST['queue'].encode()))
for number in (HOST['shm'], *range(40)):
    attempt('shmat', lambda: syscall(30, number, None, 0))
    for command in (0, 2, 13): attempt('shmctl', lambda: syscall(31, number, command, bytes(200)))
    attempt('semctl', lambda: syscall(66, number, 0, 0, 0))
    attempt('msgctl', lambda: syscall(71, number, 0, 0))
    attempt('msgrcv', lambda: syscall(70, number, bytes(100), 10, 0, 0o4000))
print('done')
""",
    ),
    Hostile(
        "shared memory with a name",
        """
from multiprocessing import shared_memory
attempt('ours', lambda: shared_memory.SharedMemory(HOST['posix']))
attempt('ours', lambda: open('/dev/shm/' + HOST['posix']))
try: shared_memory.SharedMemory('left', create=True, size=1 << 20)
except OSError: pass
os._exit(0)
""",
        afterwards="print(os.path.exists('/dev/shm/left') or 'clean')",
    ),
    Hostile(
        "descriptors in flight",
        """
import array
try:
    while True:
        a, b = socket.socketpair()
        for _ in range(50):
            fds = array.array('i', [a.fileno(), b.fileno(), 1, 2])
            a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
except OSError: pass
os.write(1, b'done\\n')
""",
    ),
    Hostile(
        "multiprocessing",
        """
import multiprocessing
try:
    with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
except OSError: pass  # tier none
print('done')
""",
    ),
    # What the next program must not see
    Hostile(
        "what the next program uses is replaced",
        """
import builtins, json, numpy, sympy, sympy.core.cache
numpy.linalg.det = lambda *_: 42
sympy.factor = sympy.Symbol = None
json.dumps = json.loads = None
sys.path[:] = ['/nowhere']
sys.meta_path.clear()
sys.modules['math'] = None
os.environ.clear()
os.environ['EVIL'] = '1'
sys.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
sys.set_int_max_str_digits(0)
signal.alarm(1)
os.umask(0o777)
os.write(1, b'done\\n')
builtins.print = builtins.open = builtins.len = None
""",
        afterwards="""
import json, math, numpy, sympy
x = sympy.Symbol('x')
assert str(sympy.factor(x**2 - 1)) == '(x - 1)*(x + 1)' and math.sqrt(4) == 2
assert abs(numpy.linalg.det(numpy.eye(2)) - 1) < 1e-9 and 'EVIL' not in os.environ and os.environ['HOME']
assert sys.gettrace() is None and sys.getprofile() is None and sys.get_int_max_str_digits() == 4300
assert os.umask(0o22) == 0o22 and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
print(json.dumps(['clean'])[2:-2])
""",
        plain=True,
    ),
    Hostile(
        "shared objects are written over",
        """
print('done', flush=True)
for victim in (None, 1, 7, '', (), print, int, sys.modules, type):
    ctypes.c_long.from_address(id(victim)).value = 1
ctypes.c_long.from_address(id(7) + 24).value = 8
import numpy
ctypes.memset(id(numpy.linalg), 0, 64)
ctypes.memset(id(sys.modules['sympy']), 0, 64)
import gc
gc.unfreeze()
gc.collect()
""",
        ("ok", "killed", "error"),
        afterwards="import numpy, sympy\nif (3 + 4, str(7), numpy.eye(1)[0, 0]) == (7, '7', 1): print('clean')",
        plain=True,
    ),
    Hostile(
        "the code of libraries is written over",
        """
print('done', flush=True)
for name in ('getpid', 'write', '_exit', 'poll', 'waitpid', 'mount'):
    place = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    if libc.mprotect(ctypes.c_void_p(place & ~4095), ctypes.c_size_t(8192), 7) == 0: ctypes.memset(place, 0xCC, 16)
os.getpid()
""",
        ("killed",),
        afterwards="print('clean' if os.getpid() > 0 else '')",
        plain=True,
    ),
    Hostile(
        "everything is unloaded",
        "for name in set(sys.modules) - {'sys', 'builtins'}: del sys.modules[name]\nvars(sys).clear()",
        ("ok", "error", "killed"),
        afterwards="import sympy\nprint('clean')",
        plain=True,
    ),
    Hostile(
        "our own modules are replaced",
        """
for name in ('program', 'supervise', 'confine', 'seccomp', 'usage', 'fork_server', '__main__'):
    module = sys.modules.get(name)
    if module is not None:
        for key in list(vars(module)):
            if not key.startswith('__') and name != '__main__': setattr(module, key, None)
os.write(1, b'done\\n')
""",
        ("ok", "error"),
        afterwards="print('clean')",
    ),
    Hostile(
        "the slot's objects",
        """
import gc
frames = []
frame = sys._getframe()
while frame: frames.append(frame); frame = frame.f_back
for frame in frames:
    slot = frame.f_locals.get('self')
    if slot is not None and hasattr(slot, 'connection'):
        attempt('send', lambda: slot.connection.sendall(b'x' * 100))
        for action in (slot.clean, slot.end):  # they reach what the program reaches
            try: action()
            except (OSError, TypeError): pass
        if getattr(slot, 'usage', None): attempt('usage', lambda: os.listdir(slot.usage.proc))
    settings = frame.f_locals.get('settings')
    if settings: attempt('control', lambda: os.write(settings['control'], b'x'))
for one in gc.get_objects():
    if isinstance(one, socket.socket): attempt('socket', lambda: one.send(b'x'))
print('done')
""",
        ("ok", "killed"),  # by the slot's own way to end its program
    ),
]

HOSTILE = {one.name: one for one in _ALL}
FAST = (
    "kills its process group",
    "files of ours",
    "variables of ours",
    "limits of the slot",
    "open descriptors",
    "signals to the slot",
    "modes, owners, times and attributes of files of ours",
    "writes where nothing may be written",
    "sockets of every family",
    "a closed folder",
    "shared objects are written over",
)
"""Those that run with every test run, in the best tier here."""
