"""A seccomp filter made by hand: system calls that no program of a model needs answer EPERM. x86-64 and arm64.

The filter is classic BPF: load the architecture and the call's number, compare, return. Names and numbers are the
kernel's (its tables of system calls); arm64 lacks some of the older calls. Only x86-64 has been run.
"""

import ctypes
import errno
import os
import platform
import struct

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
ARGUMENTS = (16, 24, 32, 40)  # of these, the low halves: the kernel reads no more of the arguments that are looked at

NEW_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags


def table(text):
    """The calls in a text: each with its name and its numbers on x86-64 and arm64, - for none."""
    calls = {}
    for call in text.split(","):
        name, *numbers = call.split()
        calls[name] = tuple(None if number == "-" else int(number) for number in numbers)
    return calls


# Denied everywhere: ways to other processes, to the kernel's rarely used parts, to namespaces, mounts and sockets, to
# memory that no limit counts (memfd), to objects that outlive their process (System V IPC, queues, keys; also to those
# of others, whose numbers can be guessed), to priorities, and to personality, which would turn address randomisation
# off.
DENIED = table("""
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, pidfd_getfd 438
    438, kcmp 312 272, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425,
    io_uring_enter 426 426, io_uring_register 427 427, add_key 248 217, request_key 249 218, keyctl 250 219, mount
    165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430,
    fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268,
    personality 135 92, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
    kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, quotactl 179 60, acct 163 89, syslog
    103 116, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170
    161, setdomainname 171 162, open_by_handle_at 304 265, name_to_handle_at 303 264, fanotify_init 300 262, socket
    41 198, memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190,
    semctl 66 191, semop 65 193, semtimedop 220 192, msgget 68 186, msgctl 71 187, msgsnd 69 189, msgrcv 70 188,
    mq_open 240 180, mq_unlink 241 181, setpriority 141 140, ioprio_set 251 30, migrate_pages 256 238, move_pages 279
    239, get_robust_list 274 100, statmount 457 457, listmount 458 458, open_tree_attr 467 467, lookup_dcookie 212
    18, vhangup 153 58, iopl 172 -, ioperm 173 -, modify_ldt 154 -
""")
# Each of these takes a process id first. Only 0, the caller, is allowed: a slot may have the same user as its program,
# which could take the slot's limits away.
ON_ITSELF = table("""
    prlimit64 302 261, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr
    314 274
""")
# Calls that are looked at: the argument, a mask for it, the values that are denied. Signals by way of a descriptor
# (F_SETOWN, F_SETSIG and their ioctls) would go to any process, a lease (F_SETLEASE) makes others wait, characters can
# be put into a terminal's input (TIOCSTI, TIOCLINUX), a program ends with its slot (PR_SET_PDEATHSIG), and memory that
# is shared without a file (MAP_SHARED | MAP_ANONYMOUS) stays while any process maps it, and counts in the writer only.
DENIED_VALUES = {
    "fcntl": (72, 25, 1, 0xFFFFFFFF, (8, 10, 15, 1024)),
    "ioctl": (16, 29, 1, 0xFFFFFFFF, (0x8901, 0x8902, 0x5412, 0x541C)),
    "prctl": (157, 167, 0, 0xFFFFFFFF, (1,)),
    "mmap": (9, 222, 3, 0x2F, (0x21, 0x23)),
}
SOCKETPAIR = (53, 199)  # allowed for AF_UNIX, but not SOCK_DGRAM: such a socket can send to others that have a path
SOCKET_TYPES = (1, 5)  # SOCK_STREAM, SOCK_SEQPACKET

# Where there is no process namespace: no other process may be made, ...
FORKS = table("fork 57 -, vfork 58 -")
# ... and none may be reached: only the program's own process id is allowed, and not 0, the group that it is in.
ON_A_PROCESS = table("""
    kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434
    434, pidfd_send_signal 424 424
""")
# Where there is no mount namespace: Landlock does not cover what changes a file without opening it (truncate: before
# Linux 6.2). It would change files of ours that have the program's user. Programs do most of this to files of their
# own, so that succeeds, without effect.
WITHOUT_EFFECT = table("""
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260
    54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
""")
ON_FILES = table("""
    setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
    setxattrat 463 463, removexattrat 466 466, file_setattr 469 469, truncate 76 45
""")
# O_TRUNC without O_WRONLY or O_RDWR; and both of these together, for which Landlock asks for no right.
DENIED_OPENS = {"open": (2, None, 1, 0x203, (0x200, 3, 0x203)), "openat": (257, 56, 2, 0x203, (0x200, 3, 0x203))}
NO_SUCH_CALL = table("clone3 435 435, openat2 437 437")  # flags out of reach; the older calls are taken then
CLONE = (56, 220)
CLONE_THREAD = 0x10000

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # columns of the tables, the kernel's numbers
X32_BIT = 0x40000000
SOME_PID = 0x7FFFFFFF  # the kernel gives no process this number


class Unsupported(Exception):
    """The kernel or the processor has no such protection."""


def instruction(code, constant, if_true=0, if_false=0):
    return struct.pack("<HBBI", code, if_true, if_false, constant)


def build(own_pid=None):
    """The filter's bytes. With `own_pid`, also what is needed where there is no process and no mount namespace.

    A jump gives the number of instructions to skip when the comparison is true, and when it is false.
    """
    if platform.machine() not in MACHINES:
        raise Unsupported(f"no seccomp filter for the processor {platform.machine()!r}")
    column, architecture = MACHINES[platform.machine()]
    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, architecture, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
    ]
    if column == 0:  # the x32 calls are the same ones under other numbers
        program += [instruction(AT_LEAST, X32_BIT, 0, 1), instruction(RETURN, ERRNO | errno.ENOSYS)]

    def add(numbers, *instructions):
        """For the call of these numbers, `instructions`, which return."""
        if numbers[column] is not None:
            program.extend([instruction(EQUAL, numbers[column], 0, len(instructions)), *instructions])

    def answer(table, code):
        for numbers in table.values():
            add(numbers, instruction(RETURN, ERRNO | code))

    allow, deny = instruction(RETURN, ALLOW), instruction(RETURN, ERRNO | errno.EPERM)
    answer(NO_SUCH_CALL, errno.ENOSYS)
    answer(DENIED, errno.EPERM)
    for numbers in ON_ITSELF.values():
        add(numbers, instruction(LOAD, ARGUMENTS[0]), instruction(EQUAL, 0, 1, 0), deny, allow)
    looked_at = dict(DENIED_VALUES)
    if own_pid is not None:
        answer(FORKS | ON_FILES, errno.EPERM)
        answer(WITHOUT_EFFECT, 0)
        looked_at |= DENIED_OPENS
        for numbers in ON_A_PROCESS.values():
            add(numbers, instruction(LOAD, ARGUMENTS[0]), instruction(EQUAL, own_pid, 1, 0), deny, allow)
    for *numbers, argument, mask, values in looked_at.values():
        tests = [instruction(EQUAL, value, len(values) - n, 0) for n, value in enumerate(values)]
        add(numbers, instruction(LOAD, ARGUMENTS[argument]), instruction(AND, mask), *tests, allow, deny)
    family = instruction(LOAD, ARGUMENTS[0]), instruction(EQUAL, 1, 0, 4)
    types = [instruction(EQUAL, one, len(SOCKET_TYPES) - n, 0) for n, one in enumerate(SOCKET_TYPES)]
    add(SOCKETPAIR, *family, instruction(LOAD, ARGUMENTS[1]), instruction(AND, 0xF), *types, deny, allow)
    forbidden = [instruction(ANY_BIT, NEW_NAMESPACES, 0, 1)]
    if own_pid is not None:
        forbidden = [instruction(ANY_BIT, NEW_NAMESPACES, 1, 0), instruction(ANY_BIT, CLONE_THREAD, 1, 0)]
    add(CLONE, instruction(LOAD, ARGUMENTS[0]), *forbidden, deny, allow)
    program.append(allow)
    return b"".join(program)


def install(libc, program):
    """Put the filter on this process, for good. Needs no_new_privs. Raises `Unsupported` where there is no seccomp.

    A filter is built once, since it takes a while, for `SOME_PID`; here it gets this process's number.
    """
    program = program.replace(instruction(EQUAL, SOME_PID, 1, 0), instruction(EQUAL, os.getpid(), 1, 0))
    instructions = ctypes.create_string_buffer(program)
    sock_fprog = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    if libc.prctl(22, 2, sock_fprog, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise Unsupported(f"the kernel refuses a seccomp filter (errno {ctypes.get_errno()})")
