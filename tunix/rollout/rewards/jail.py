"""A Python process that runs an untrusted program and its tests, and can do nothing else. `code.py` starts it.

On Linux the kernel restricts it: Landlock (https://docs.kernel.org/userspace-api/landlock.html) lets it read Python's
own files and write one temporary folder; a seccomp filter refuses sockets, new processes and programs, signals, and
anything that could lift the restrictions; resource limits bound memory, time and file sizes. Where the kernel lacks one
of the two (macOS, old kernels), Python's audit hook refuses the same actions by name: that stops accidents and
cheating, not an attacker.

Standard library only: this file runs isolated (`python -I`), without tunix.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# Linux system calls that are refused: (x86_64, aarch64); None where an architecture lacks it.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mknod": (133, None), "mknodat": (259, 33), "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "chroot": (161, 51), "pivot_root": (155, 41), "unshare": (272, 97),
    "setns": (308, 268), "open_by_handle_at": (304, 265), "setrlimit": (160, 164), "setpriority": (141, 140),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60),
}  # fmt: skip
CLONE, PRLIMIT, CLONE3 = (56, 220), (302, 261), 435
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
X32 = 0x40000000

# Landlock's rights over files, of which each version of the kernel's interface knows the first few.
EXECUTE, WRITE, READ, LIST, TRUNCATE = 1, 2, 4, 8, 1 << 14
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

REFUSED_EVENTS = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.chmod",
    "os.chown", "os.setxattr", "os.utime", "pty.", "ctypes.dlopen", "signal.pthread_kill", "shutil.", "urllib.",
)  # fmt: skip
WRITING_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")


def main() -> None:
    """Restricts the process and runs the program; then runs the tests and writes the word for each that passes."""
    limits = json.loads(sys.argv[1])
    # The program's input and output lead nowhere; ours have other descriptors.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    program = json.loads(requests.readline())
    lock(limits)
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(program, "solution.py", "exec"), namespace)
    answers.write(b"ran\n")
    tests = json.loads(requests.readline())
    for source in tests["tests"]:
        if passes(source, namespace):
            answers.write(tests["word"].encode() + b"\n")
    os._exit(0)


def passes(source: str, namespace: dict[str, Any]) -> bool:
    """Whether a test runs without an error, and so do the test functions and classes that it defines."""
    try:
        scope = dict(namespace)
        exec(compile(source, "tests.py", "exec"), scope)
        for name, value in list(scope.items()):
            if value is namespace.get(name):
                continue
            if isinstance(value, type) and hasattr(value, "assertEqual"):
                import unittest

                result = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
                if not result.wasSuccessful():
                    return False
            elif name.startswith("test") and callable(value):
                value()
    except BaseException:  # SystemExit is no pass either
        return False
    return True


def lock(limits: dict[str, Any]) -> None:
    """Restricts this process, irrevocably, to what a program under test needs."""
    seconds = int(limits["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_AS, limits["memory"]),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if sys.platform == "linux" and platform.machine() in ARCHITECTURES:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: SIGKILL when the worker is gone
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which both restrictions require
        code = filter_code(*ARCHITECTURES[platform.machine()])
        # struct sock_fprog: the number of instructions, and where they are.
        program = struct.pack("HP", len(code) // 8, ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p).value)
        if restrict_files(libc, limits["folder"]) and libc.prctl(22, 2, program, 0, 0) == 0:
            return  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER: EPERM for refused calls; there are kernels without
    sys.addaudithook(hook(limits["folder"]))


def restrict_files(libc: ctypes.CDLL, folder: str) -> bool:
    """Restricts files by Landlock: Python and system libraries to read, the folder to write. False without Landlock."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << RIGHTS.get(version, 16)) - 1
    ruleset = libc.syscall(444, struct.pack("Q", handled), 8, 0)
    places = {*sys.path, sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"}
    rules = [(place, READ | LIST | EXECUTE) for place in places] + [(device, READ | WRITE) for device in DEVICES]
    for place, rights in [*rules, (folder, handled)]:
        if not os.path.exists(place):
            continue
        if not os.path.isdir(place):
            rights &= EXECUTE | WRITE | READ | TRUNCATE
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights & handled, descriptor), 0):
            return False
        os.close(descriptor)
    done = libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def filter_code(column: int, architecture: int) -> bytes:
    """The filter's BPF instructions (https://docs.kernel.org/userspace-api/seccomp_filter.html).

    Args:
        column: of the table of system calls.
        architecture: the number in `seccomp_data`: nr at byte 0, arch at 4, arguments from 16, low word first.
    """
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x50000 | EPERM, 0x50000 | ENOSYS, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, X32), (answer, 0, 0, refuse)]
    code += [(equal, 0, 1, CLONE3), (answer, 0, 0, unknown)]  # its flags cannot be read: the C library falls back
    for number in (numbers[column] for numbers in REFUSED.values()):
        if number is not None:
            code += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    # A thread may start, a process may not.
    code += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16)]
    code += [(any_bit, 1, 0, CLONE_THREAD), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    # Limits may be read, not set: the pointer to new limits, argument 2, has to be null in both words.
    code += [(equal, 0, 5, PRLIMIT[column]), (load, 0, 0, 32), (equal, 0, 2, 0), (load, 0, 0, 36)]
    code += [(equal, 1, 0, 0), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", kind, met, unmet, value) for kind, met, unmet, value in code)


def hook(folder: str) -> Any:
    """The audit hook for systems without Landlock or seccomp."""
    inside = os.path.realpath(folder) + os.sep

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED_EVENTS):
            raise PermissionError(f"{event} is refused")
        writes = event == "open" and arguments[2] and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event.startswith(WRITING_EVENTS):
            paths = [path for path in arguments[:2] if isinstance(path, str | bytes)]
            if not all((os.path.realpath(os.fsdecode(path)) + os.sep).startswith(inside) for path in paths):
                raise PermissionError(f"{event} is refused outside of {folder}")

    return refuse


if __name__ == "__main__":
    main()
