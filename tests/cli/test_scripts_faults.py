"""Bad luck of ``shared-rpc run``: whatever happens to a zygote, the script runs, and nobody gets what is another one's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shared_rpc.scripts.key import limits
from shared_rpc.scripts.listing import stop_zygotes
from shared_rpc.zygote.wire import Lost, framed, receive
from tests.kit.attacker import STRANGER, needs_another_uid
from tests.kit.processes import Child, eventually, sigstop
from tests.kit.scripts import RUN, Place

pytestmark = pytest.mark.timeout(300)

HAS_TORCH = "import sys; print('torch' in sys.modules)"
WITHOUT = "shared-rpc: runs without a zygote: "
#: JSON that no parser with a stack can take.
NESTED = (100_000).to_bytes(4, "big") + b"[" * 100_000


@pytest.fixture
def place(tmp_path: Path, sockets: Path) -> Place:
    """A directory of its own for the scripts of a test."""
    return Place(tmp_path, sockets, forks=True)


@pytest.fixture
def zygote(place: Place) -> int:
    """The process id of the zygote that the scripts of the place have."""
    before = {(one["pid"], one["runs"]) for one in place.zygotes()}
    assert place.run(place.write("pass", "warm.py")).code == 0
    (asked,) = [one["pid"] for one in place.zygotes() if (one["pid"], one["runs"]) not in before]
    return int(asked)


def socket_of(place: Place, pid: int) -> str:
    """Where a zygote listens."""
    return str(next(one["socket_path"] for one in place.zygotes() if one["pid"] == pid))


# The zygote's death.


def test_a_zygote_that_was_killed_is_replaced(place: Place, zygote: int) -> None:
    """Its socket is left behind, and the next script finds nobody there."""
    os.kill(zygote, signal.SIGKILL)
    ran = place.run(place.write(HAS_TORCH))
    assert (ran.output, ran.errors) == ("True\n", "")
    assert zygote not in [one["pid"] for one in place.zygotes()]


def test_a_script_outlives_its_zygote(place: Place, zygote: int, children: list[Child]) -> None:
    """Killed or stopped, it is no loss: exit code and signals of what runs come through."""
    script = place.write("import sys; print('ready', flush=True); sys.exit(int(sys.stdin.readline()))")
    children += [place.start(script), place.start(script)]
    for child in children:
        child.expect("ready")
    sigstop(zygote)
    children[0].tell("7")
    assert children[0].close() == (7, "")
    os.kill(zygote, signal.SIGKILL)
    children[1].process.send_signal(signal.SIGTERM)
    assert children[1].process.wait(20) == -signal.SIGTERM


def test_a_zygote_that_is_stopped_is_passed_by(place: Place, zygote: int) -> None:
    """At once, and not when patience ends. What it was asked it does not do later: the script runs once."""
    counted = place.folder / "counted"
    script = place.write(f"open({str(counted)!r}, 'a').write('x')\n{HAS_TORCH}")
    sigstop(zygote)
    try:
        ran = place.run(script)
        assert ran.output == "False\n"
        assert ran.errors.startswith(f"{WITHOUT}the zygote (pid {zygote}) is stopped")
    finally:
        os.kill(zygote, signal.SIGCONT)
    # It answers one request after the other: when this one's script has run, the one before has been looked at.
    assert place.run(place.write(HAS_TORCH, "next.py")).output == "True\n"
    assert counted.read_text() == "x"


def test_a_zygote_that_dies_while_it_starts(place: Place, tmp_path: Path, children: list[Child]) -> None:
    """The one who waited for it runs the script without."""
    other = Place(place.folder, tmp_path)
    tmp_path.chmod(0o700)
    child = other.start(place.write(HAS_TORCH))
    children.append(child)
    found: list[int] = []

    def starting() -> bool:
        found[:] = [pid for pid in pids() if f"{tmp_path}/s-" in command_of(pid) and "shared_rpc.zygote" in command_of(pid)]
        return bool(found)

    eventually(starting, 60)
    os.kill(found[0], signal.SIGKILL)
    assert child.expect_error(WITHOUT).endswith(".log")
    assert child.expect("") == "False"


def pids() -> list[int]:
    """Of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_of(pid: int) -> str:
    """The command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_twenty_at_once_have_one_zygote(place: Place, tmp_path: Path) -> None:
    """One of them starts it, the others wait for it; each gets what it printed, and its own code."""
    other = Place(place.folder, tmp_path, forks=True)
    tmp_path.chmod(0o700)
    script = place.write("import sys; print(sys.argv[1], 'torch' in sys.modules); sys.exit(int(sys.argv[1]))")
    try:
        with ThreadPoolExecutor(20) as pool:
            ran = list(pool.map(lambda number: other.run(script, number), range(20)))
        assert ran == [(number, f"{number} True\n", "") for number in range(20)]
        assert [one["runs"] for one in other.zygotes()] == [20]
    finally:
        other.close()


def test_a_command_that_is_killed_while_its_script_starts(place: Place, zygote: int) -> None:
    """Whenever that is, no script is left that nobody watches, and the zygote serves the next one."""
    script = place.write("import time; time.sleep(600)", "sleeps.py")
    for milliseconds in range(0, 200, 20):
        process = subprocess.Popen([sys.executable, *RUN, str(script)], env=place.environ)
        threading.Event().wait(milliseconds / 1000)
        process.kill()
        process.wait()
    eventually(lambda: not any(str(script) in command_of(pid) for pid in pids()), 30)
    assert place.run(place.write(HAS_TORCH)).output == "True\n"


def test_a_zygote_ends_when_nobody_needs_it(place: Place, tmp_path: Path) -> None:
    """As soon as the last one to ask has said; a script that still runs does not need it."""
    other = Place(place.folder, tmp_path, forks=True)
    tmp_path.chmod(0o700)
    assert other.run("--idle-exit", "0", place.write(HAS_TORCH)).output == "True\n"
    eventually(lambda: not other.zygotes() and not list(tmp_path.glob("*.zygote")), 30)


def test_a_zygote_without_its_socket_ends(place: Place, zygote: int) -> None:
    """Nobody can ask it for anything; who wants a script has another one."""
    Path(socket_of(place, zygote)).unlink()
    ran = place.run(place.write(HAS_TORCH))
    assert (ran.output, ran.errors) == ("True\n", "")
    eventually(lambda: zygote not in pids())


def test_a_client_that_says_nothing_holds_up_no_other(place: Place, zygote: int) -> None:
    """Neither those of the same zygote, nor of the next one when that has ended."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_of(place, zygote))
        assert receive(silent)[0]["type"] == "Greeting"
        # The fork that listens to it keeps nothing that another zygote would wait for.
        (fork,) = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
        eventually(lambda: sum(link.startswith("socket:") for link in links_of(int(fork))) == 1)
        assert not [link for link in links_of(int(fork)) if link.endswith(".spawn")]
        script = place.write(HAS_TORCH)
        assert place.run(script).output == "True\n"
        os.kill(zygote, signal.SIGKILL)
        ran = place.run(script)
        assert (ran.output, ran.errors) == ("True\n", "")
        assert zygote not in [one["pid"] for one in place.zygotes()]


# What is preloaded.


@pytest.fixture
def installed(place: Place) -> Callable[[str, str], None]:
    """``installed(name, source)`` makes a package as pip would."""
    folder = place.folder / "site-packages"
    folder.mkdir()
    place.environ["PYTHONPATH"] += f"{os.pathsep}{folder}"

    def install(name: str, source: str) -> None:
        (folder / f"{name}.py").write_text(textwrap.dedent(source))

    return install


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no luck')", "cannot import preloaded: RuntimeError: no luck"),
        ("raise SystemExit(3)", "cannot import preloaded: SystemExit: 3"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()", "it has threads"),
        ("import socket; kept = socket.socket()", "is open"),
        ("import os; os._exit(3)", "the zygote ended before it listened"),
    ],
    ids=["raises", "exits", "threads", "socket", "ends"],
)
def test_what_must_not_be_preloaded(
    place: Place, tmp_path: Path, installed: Callable[[str, str], None], source: str, reason: str
) -> None:
    """The script runs without, and a line says why."""
    other = Place(place.folder, tmp_path, forks=True)
    other.environ["PYTHONPATH"] = place.environ["PYTHONPATH"]
    tmp_path.chmod(0o700)
    installed("preloaded", source)
    ran = other.run("--preload", "preloaded", place.write(HAS_TORCH))
    assert (ran.code, ran.output) == (0, "False\n")
    assert ran.errors.startswith(WITHOUT)
    assert reason in ran.errors
    assert ran.errors.count("\n") == 1


def test_a_reason_is_remembered(place: Place, tmp_path: Path, installed: Callable[[str, str], None]) -> None:
    """Nobody waits for the imports of a process again that cannot be forked."""
    other = Place(place.folder, tmp_path, forks=True)
    other.environ["PYTHONPATH"] = place.environ["PYTHONPATH"]
    tmp_path.chmod(0o700)
    counted = place.folder / "counted"
    installed("preloaded", f"open({str(counted)!r}, 'a').write('x'); raise ValueError")
    script = place.write(HAS_TORCH)
    errors = {other.run("--preload", "preloaded", script).errors for _ in range(3)}
    assert len(errors) == 1
    assert counted.read_text() == "x"


def test_what_is_preloaded_is_there_and_is_read_anew_when_it_changes(
    place: Place, tmp_path: Path, installed: Callable[[str, str], None]
) -> None:
    """A package that was upgraded, or edited, is never used as it was."""
    other = Place(place.folder, tmp_path, forks=True)
    other.environ["PYTHONPATH"] = place.environ["PYTHONPATH"]
    tmp_path.chmod(0o700)
    installed("preloaded", "value = 1")
    script = place.write("import sys; there = 'preloaded' in sys.modules; import preloaded; print(there, preloaded.value)")
    other.environ["SHARED_TENSOR_RUN_PRELOAD"] = "preloaded"
    try:
        assert other.run(script).output == "True 1\n"
        installed("preloaded", "value = 2 + 20")
        assert other.run(script).output == "True 22\n"
        assert len(other.zygotes()) == 1
    finally:
        other.close()


def test_a_persons_own_modules_are_never_preloaded(place: Place, tmp_path: Path) -> None:
    """They change from run to run; only what is installed is imported beforehand."""
    other = Place(place.folder, tmp_path, forks=True)
    tmp_path.chmod(0o700)
    (place.folder / "src").mkdir()
    place.write("raise RuntimeError('imported')", "src/mine.py")
    other.environ["PYTHONPATH"] += f"{os.pathsep}{place.folder}/src"
    ran = other.run("--preload", "mine", place.write(HAS_TORCH))
    assert ran.output == "False\n"
    assert ran.errors.startswith(WITHOUT)
    assert "RuntimeError" not in ran.errors


@pytest.mark.parametrize("name", ["numpy.py", "torch/__init__.py", "json.py"])
def test_a_module_beside_the_script_comes_first(place: Place, name: str) -> None:
    """As with python: the zygote has another one of that name, so it does not take part."""
    place.write("name = 'mine'", f"app/{name}")
    module = name.partition("/")[0].removesuffix(".py")
    script = place.write(f"import {module}; print({module}.name)", "app/script.py")
    ran = place.run(script)
    assert ran.output == "mine\n"
    assert "the program's path has another " in ran.errors


def test_a_module_in_an_archive_comes_first(place: Place) -> None:
    """A zip archive is a directory of modules too."""
    import zipfile

    with zipfile.ZipFile(place.folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "import numpy; print(numpy.name)")
        archive.writestr("numpy.py", "name = 'mine'")
    ran = place.run("app.pyz")
    assert ran.output == "mine\n"
    assert "the program's path has another " in ran.errors


# Descriptors, users, sockets.

LISTS = """
    import json, os, sys
    print("ready", flush=True)
    sys.stdin.readline()
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    print(json.dumps(found))
"""


def test_a_descriptor_of_one_command_never_reaches_another_ones_script(place: Place, children: list[Child]) -> None:
    """Many at once, each with a file of its own: each has that, its streams, and nothing else. No zygote or watcher has it."""
    script = place.write(LISTS)
    files = []
    for number in range(6):
        path = place.folder / f"file {number}"
        path.touch()
        files.append(path)
        with open(path) as file:
            begin = f"import os, sys\nos.dup2({file.fileno()}, 50)\nos.close({file.fileno()})\n"
            # It has the number 50 in each.
            child = Child(
                "-c",
                f"{begin}os.execv(sys.executable, sys.argv[1:])",
                *(sys.executable, *RUN, str(script)),
                environ=place.environ,
                cwd=place.folder,
                pass_fds=(file.fileno(),),
                options=(),
            )
        children.append(child)
    for child in children:
        child.expect("ready")
    others = [pid for pid in pids() if "shared_rpc.zygote" in command_of(pid)]
    held = [link for pid in others for link in links_of(pid)]
    assert others
    assert not [link for link in held if str(place.folder) in link]
    for child, path in zip(children, files, strict=True):
        child.tell("")
        found = {int(fd): link for fd, link in json.loads(child.expect("{")).items()}
        assert set(found) - {3} == {0, 1, 2, 50}, "3 is the directory that was listed"
        assert found[50] == str(path)
        assert child.close() == (0, "")


def links_of(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has closed this one meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_many_descriptors_are_passed_on(place: Place) -> None:
    """More than one message can carry."""
    script = place.write("import os; print(sum(os.path.exists(f'/proc/self/fd/{n}') for n in range(100, 600)))")

    def begin() -> None:
        for number in range(100, 600):
            os.dup2(0, number)

    plain, forked = place.both(script, setup=begin, close_fds=False)
    assert forked == plain == (0, "500\n", "")


def test_a_zygote_serves_its_own_user_only(place: Place, zygote: int) -> None:
    """Whoever else can connect is hung up on, before anything that he sends is read."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    path = socket_of(place, zygote)
    for folder in [Path(path).parent, *Path(path).parents]:
        if folder.stat().st_mode & 0o011 != 0o011 and str(folder).startswith("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    Path(path).chmod(0o666)
    try:
        code = f"""
            import os, socket
            os.setuid(65534)
            s = socket.socket(socket.AF_UNIX)
            s.connect({path!r})
            try:
                s.sendall({framed({"type": "TellState"})!r})
                print("got", s.recv(100))
            except (BrokenPipeError, ConnectionResetError):
                print("got", b"")
        """
        ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
        assert ran.stdout == "got b''\n"
    finally:
        Path(path).chmod(0o600)
        Path(path).parent.chmod(0o700)


def test_a_squatters_socket_is_not_used(place: Place, zygote: int) -> None:
    """Another user listens where the zygote would: nothing is sent there."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    path = socket_of(place, zygote)
    os.kill(zygote, signal.SIGKILL)
    Path(path).unlink()
    code = f"""
        import os, socket
        s = socket.socket(socket.AF_UNIX)
        s.bind({path!r})
        os.chmod({path!r}, 0o777)
        os.setuid(65534)
        s.listen()
        print("listens", flush=True)
        peer, _ = s.accept()
        print("read", peer.recv(100), flush=True)
    """
    squatter = Child("-c", textwrap.dedent(code))
    try:
        squatter.expect("listens")
        ran = place.run(place.write(HAS_TORCH))
        assert ran.output == "False\n"
        assert f"pid {squatter.pid} of another user (uid 65534) listens at {path}" in ran.errors
        assert squatter.expect("read") == "read b''"
    finally:
        squatter.kill()
        Path(path).unlink()


def test_a_directory_of_somebody_else_is_not_used(place: Place, tmp_path: Path) -> None:
    """Others could put a socket there."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    ran = Place(place.folder, open_to_all, forks=True).run(place.write(HAS_TORCH))
    assert ran.output == "False\n"
    assert "other users can write to it" in ran.errors


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\2[]",
        b"\0\0\0\4nope",
        framed({"type": "Fork"}),
        framed({"type": "Fly"}),
        framed({}),
        NESTED,
    ],
    ids=range(9),
)
def test_nonsense_does_not_end_a_zygote(place: Place, zygote: int, sent: bytes) -> None:
    """It hangs up on who sends that, and has no descriptor left of it."""
    before = len(links_of(zygote))
    with socket.socket(socket.AF_UNIX) as sock, open(os.devnull) as file:
        sock.connect(socket_of(place, zygote))
        if sent:
            socket.send_fds(sock, [sent], [file.fileno()])
        sock.shutdown(socket.SHUT_WR)
        answers = []
        with pytest.raises((Lost, ConnectionResetError)):
            while True:
                answers.append(receive(sock)[0]["type"])
    assert set(answers) <= {"Greeting", "ForkRefused"}
    eventually(lambda: len(links_of(zygote)) <= before)
    assert place.run(place.write(HAS_TORCH)).output == "True\n"
    assert zygote in [one["pid"] for one in place.zygotes()]


# Files beside the socket, in a directory where others can make some.


@pytest.fixture
def ended_zygote(place: Place, zygote: int) -> str:
    """The socket of a zygote that has ended: the next script starts another one."""
    path = socket_of(place, zygote)
    place.close()
    return path


def put(path: str, kind: str) -> None:
    """Put another kind of file in the place of a file."""
    if os.path.lexists(path):
        os.unlink(path)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        Path(path).write_text("\x1b]0;owned\x07 by others")


@pytest.fixture
def clean(ended_zygote: str) -> Iterator[None]:
    """Nothing of it is left for other tests."""
    yield
    for path in (f"{ended_zygote}.spawn", f"{ended_zygote}.log"):
        Path(path).unlink(missing_ok=True)


def test_a_reason_has_no_control_characters(place: Place, ended_zygote: str, clean: None) -> None:
    """It is one line, whatever the file has."""
    Path(f"{ended_zygote}.spawn").write_text("1 lasting\n\x1b]0;owned\x07 by others")
    assert place.run(place.write(HAS_TORCH)).errors == f"{WITHOUT}]0;owned by others\n"


@pytest.mark.parametrize("kind", ["pipe", pytest.param("text", marks=needs_another_uid)])
def test_a_log_of_others_is_not_used(place: Place, ended_zygote: str, clean: None, kind: str) -> None:
    """The script runs without a zygote, which would have no log, and the file is as it was."""
    log = f"{ended_zygote}.log"
    put(log, kind)
    if os.geteuid() == 0:
        os.chown(log, STRANGER, STRANGER)
    ran = place.run(place.write(HAS_TORCH))
    assert ran.output == "False\n" and f"{WITHOUT}cannot start a zygote: {log}" in ran.errors
    assert kind == "pipe" or "by others" in Path(log).read_text()


def test_only_zygotes_are_stopped(tmp_path: Path, children: list[Child]) -> None:
    """Another program of this user that listens where a zygote would is passed over."""
    place = Place(tmp_path, tmp_path)
    daemon = Child(
        "-c",
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('up'); input()",
        f"{place.base_path}-key.zygote",
    )
    children.append(daemon)
    daemon.expect("up")
    reasons: list[str] = []
    assert stop_zygotes(place.base_path, reasons.append) == []
    assert f"(pid {daemon.pid}) did not answer as a zygote" in reasons[0]
    assert daemon.process.poll() is None


@needs_another_uid
def test_a_link_of_others_is_not_followed(place: Place, zygote: int, tmp_path: Path) -> None:
    """By no command: not by ls and stop, and not by run, though a zygote of this user is where it leads."""
    other = Place(place.folder, tmp_path, forks=True)
    tmp_path.chmod(0o700)
    path = socket_of(place, zygote)
    link = f"{other.base_path}-{path.rpartition('-')[2]}"
    os.symlink(path, link)
    os.lchown(link, STRANGER, STRANGER)
    other.environ["PYTHONPATH"] = place.environ["PYTHONPATH"]
    assert other.zygotes() == stop_zygotes(other.base_path, lambda reason: None) == []
    ran = other.run(other.write(HAS_TORCH))
    assert (ran.output, ran.errors) == ("False\n", f"{WITHOUT}{link} is a link of another user (uid {STRANGER})\n")


# Scripts.


def test_a_working_directory_that_was_removed(place: Place) -> None:
    """The script is in it all the same."""
    script = place.write("import os\ntry: print(os.getcwd())\nexcept FileNotFoundError: print('gone')")
    plain, forked = (removed(place, script, way) for way in ((), RUN))
    assert forked == plain == ("gone\n", "")


def removed(place: Place, script: Path, way: tuple[str, ...]) -> tuple[str, str]:
    """What a script says whose working directory is removed before it begins."""
    gone = place.folder / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *way, str(script)],
        cwd=gone,
        env=place.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout, ran.stderr


def test_a_script_that_cannot_be_read(place: Place) -> None:
    """Python says so."""
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    script = place.write("print('ran')")
    script.chmod(0)
    plain, forked = place.both(script)
    assert forked == plain
    assert forked.code == 2


def test_very_long_arguments_and_variables(place: Place) -> None:
    """What the kernel takes is passed on whole."""
    script = place.write("import os, sys; print([len(a) for a in sys.argv[1:]], len(os.environ['LARGE']), len(os.environ))")
    environ: dict[str, str | None] = {"LARGE": "x" * 100_000} | {f"V{number}": "y" * 1000 for number in range(300)}
    plain, forked = place.both(script, "a" * 120_000, *["b" * 1000] * 500, environ=environ)
    assert forked == plain
    assert forked.code == 0


def test_a_limit_that_a_script_cannot_have_is_pythons(place: Place) -> None:
    """Hard limits are in the key: who has another one has another zygote, and limits that fit no zygote run without."""
    import resource

    def begin() -> None:
        # Imports of torch do not fit: the zygote cannot start, and the script does not need it.
        resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))

    ran = place.run(place.write(HAS_TORCH), setup=begin)
    assert ran.output == "False\n"
    assert ran.errors.startswith(WITHOUT)
    assert resource.RLIMIT_AS in limits()


def test_a_setting_that_is_none(place: Place) -> None:
    """The script runs, and a line says what is wrong."""
    ran = place.run(place.write(HAS_TORCH), environ={"SHARED_TENSOR_RUN_IDLE_EXIT": "soon"})
    assert ran == (0, "False\n", f"{WITHOUT}SHARED_TENSOR_RUN_IDLE_EXIT='soon': use a number of seconds, or leave it unset\n")


#: A watcher that may not signal its script, as where that has become a program of another user (su, sudo): here the watcher
#: becomes one. Its command is at the other end of the socket with the number that is given.
WATCHER = """
    import os, socket, sys
    from shared_rpc.zygote.process import fork_watched

    os.register_at_fork(after_in_parent=lambda: os.setresuid(65534, 65534, 65534))
    fork_watched(socket.socket(fileno=int(sys.argv[1])))
    print("begun", flush=True)
    os._exit(int(sys.stdin.readline()))
"""


@pytest.fixture
def unruly(children: list[Child]) -> Iterator[tuple[Child, socket.socket]]:
    """A watcher of another user's script, which waits for its exit code, and the command's socket."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    command, connection = socket.socketpair()
    with command:
        command.settimeout(60)
        child = Child("-c", textwrap.dedent(WATCHER), str(connection.fileno()), pass_fds=[connection.fileno()], fresh=True)
        children.append(child)
        connection.close()
        child.expect("begun")
        yield child, command


def test_the_end_of_a_script_that_has_become_another_user_s_is_reported(unruly: tuple[Child, socket.socket]) -> None:
    """Its watcher needs no permission for that."""
    child, command = unruly
    child.tell("5")
    assert receive(command) == ({"type": "Ended", "code": 5}, [])


def test_a_script_that_has_become_another_user_s_outlives_its_command(unruly: tuple[Child, socket.socket]) -> None:
    """It cannot be killed, and its watcher ends as it does otherwise."""
    child, command = unruly
    command.close()
    assert child.process.wait(20) == 0
    child.tell("0")
    assert child.close() == (0, "")
