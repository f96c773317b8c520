"""Faults around ``shared-rpc run``: the script runs whatever happens to a zygote, with nothing of another script.

For the imports of a zygote, and the state of its forks, see `broker/test_zygote.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared_rpc.scripts.listing import stop_zygotes
from shared_rpc.zygote.wire import Lost, framed, receive
from tests.kit.attacker import STRANGER, needs_another_uid
from tests.kit.processes import Child, eventually, links_of, sigstop
from tests.kit.scripts import RUN, Place
from tests.kit.world import World

pytestmark = pytest.mark.timeout(300)

HAS_TORCH = "import sys; print('torch' in sys.modules)"
WITHOUT = "shared-rpc: running without a zygote: "
#: JSON that no parser with a stack can take.
NESTED = (100_000).to_bytes(4, "big") + b"[" * 100_000


@pytest.fixture
def alone(place: Place, tmp_path: Path) -> Iterator[Place]:
    """The same directory of scripts, with separate zygotes."""
    tmp_path.chmod(0o700)
    alone = Place(place.folder, tmp_path)
    yield alone
    alone.close()


@pytest.fixture
def zygote(place: Place) -> int:
    """The process id of the zygote of that place."""
    before = {(one["pid"], one["runs"]) for one in place.zygotes()}
    assert place.run(place.write("pass", "warm.py")).code == 0
    (asked,) = [one["pid"] for one in place.zygotes() if (one["pid"], one["runs"]) not in before]
    return int(asked)


def has_torch(place: Place, *words: str, forked: bool = True) -> str:
    """Run a script that detects whether it is a fork of a zygote; return its errors."""
    ran = place.run(*words, place.write(HAS_TORCH))
    assert (ran.code, ran.output) == (0, f"{forked}\n"), ran.errors
    return ran.errors


def socket_of(place: Place, pid: int) -> str:
    """Return the address of a zygote."""
    return str(next(one["socket_path"] for one in place.zygotes() if one["pid"] == pid))


@pytest.mark.parametrize("how", ["killed", "without its socket"])
def test_a_lost_zygote_is_replaced(place: Place, zygote: int, how: str) -> None:
    """A killed one leaves its socket; one whose socket was removed ends, because no command can find it."""
    if how == "killed":
        os.kill(zygote, signal.SIGKILL)
    else:
        Path(socket_of(place, zygote)).unlink()
    assert has_torch(place) == ""
    assert zygote not in [one["pid"] for one in place.zygotes()]
    eventually(lambda: zygote not in pids() or not command_of(zygote))


@pytest.mark.deep  # for the seconds after which the command gives up
def test_a_stopped_zygote_is_given_up(place: Place, zygote: int) -> None:
    """The script runs without it, and not a second time when the zygote continues."""
    counted = place.folder / "counted"
    script = place.write(f"open({str(counted)!r}, 'a').write('x')\n{HAS_TORCH}")
    sigstop(zygote)
    try:
        ran = place.run(script)
        assert ran.output == "False\n"
        assert ran.errors.startswith(f"{WITHOUT}the zygote at ")
    finally:
        os.kill(zygote, signal.SIGCONT)
    # It answers one request after another: once it has run this script, it has seen the request before.
    assert has_torch(place) == ""
    assert counted.read_text() == "x"


def test_a_zygote_that_is_killed_while_it_starts(place: Place, tmp_path: Path, world: World) -> None:
    """The command that waits for it runs the script without."""
    tmp_path.chmod(0o700)
    child = Place(place.folder, tmp_path).start(place.write(HAS_TORCH))
    world.children.append(child)

    def starting() -> list[int]:
        commands = {pid: command_of(pid) for pid in pids()}
        return [pid for pid, command in commands.items() if f"{tmp_path}/s-" in command and "shared_rpc.zygote" in command]

    eventually(lambda: bool(starting()), 60)
    os.kill(starting()[0], signal.SIGKILL)
    assert child.expect_error(WITHOUT).endswith(".log")
    assert child.expect("") == "False"


def pids() -> list[int]:
    """Return the process ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_of(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_twenty_scripts_at_once_have_one_zygote(alone: Place) -> None:
    """One command starts it, the others wait for it; each gets its own output and exit code."""
    script = alone.write("import sys; print(sys.argv[1], 'torch' in sys.modules); sys.exit(int(sys.argv[1]))")
    with ThreadPoolExecutor(20) as pool:
        ran = list(pool.map(lambda number: alone.run(script, number), range(20)))
    assert ran == [(number, f"{number} True\n", "") for number in range(20)]
    assert [one["runs"] for one in alone.zygotes()] == [20]


def test_a_command_that_is_killed_while_its_script_starts(place: Place, zygote: int) -> None:
    """At any time: no script is left without a watcher, and the zygote serves the next one."""
    script = place.write("import time; time.sleep(600)", "sleeps.py")
    for milliseconds in range(0, 200, 20):
        process = subprocess.Popen([sys.executable, *RUN, str(script)], env=place.environ)
        threading.Event().wait(milliseconds / 1000)
        process.kill()
        process.wait()
    eventually(lambda: not any(str(script) in command_of(pid) for pid in pids()), 30)
    assert has_torch(place) == ""


def test_an_idle_zygote_ends(alone: Place) -> None:
    """After the time that the last command requested."""
    assert has_torch(alone, "--idle-exit", "0") == ""
    eventually(lambda: not alone.zygotes() and not list(Path(alone.base_path).parent.glob("*.zygote")), 30)


def test_a_silent_client_delays_no_other(place: Place, zygote: int) -> None:
    """Neither at the same zygote, nor at the next one when that was killed."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_of(place, zygote))
        assert receive(silent)[0]["type"] == "Greeting"
        assert has_torch(place) == ""
        os.kill(zygote, signal.SIGKILL)
        assert has_torch(place) == ""
        assert zygote not in [one["pid"] for one in place.zygotes()]


@pytest.fixture
def install(alone: Place) -> Callable[[str], None]:
    """``install(source)`` installs a module ``preloaded`` like pip."""
    folder = alone.folder / "site-packages"
    folder.mkdir()
    alone.environ["PYTHONPATH"] += f"{os.pathsep}{folder}"
    return lambda source: (folder / "preloaded.py").write_text(textwrap.dedent(source)) and None


def test_modules_that_cannot_be_preloaded(alone: Place, install: Callable[[str], None]) -> None:
    """The script runs without a zygote, and a line says why."""
    install("raise RuntimeError('no luck')")
    errors = has_torch(alone, "--preload", "preloaded", forked=False)
    assert errors.startswith(WITHOUT) and "cannot import preloaded: RuntimeError: no luck" in errors


def test_a_changed_module_is_preloaded_again(alone: Place, install: Callable[[str], None]) -> None:
    """An upgraded or edited package is never used in its old version."""
    script = alone.write("import sys; there = 'preloaded' in sys.modules; import preloaded; print(there, preloaded.value)")
    alone.environ["SHARED_TENSOR_RUN_PRELOAD"] = "preloaded"
    for source, value in (("value = 1", 1), ("value = 2 + 20", 22)):
        install(source)
        assert alone.run(script).output == f"True {value}\n"
    assert len(alone.zygotes()) == 1


@needs_another_uid
def test_a_zygote_serves_its_own_user_only(place: Place, zygote: int) -> None:
    """The connection of another user is closed before anything is read from it."""
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


@needs_another_uid
def test_a_squatters_socket_is_not_used(place: Place, zygote: int) -> None:
    """Another user listens where the zygote would: nothing is sent to it."""
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
        errors = has_torch(place, forked=False)
        assert f"pid {squatter.pid} of another user (uid 65534) listens at {path}" in errors
        assert squatter.expect("read") == "read b''"
    finally:
        squatter.kill()
        Path(path).unlink()


@needs_another_uid
def test_a_link_of_another_user_is_not_followed(place: Place, zygote: int, alone: Place) -> None:
    """By no command, although a zygote of this user is its target."""
    path = socket_of(place, zygote)
    link = f"{alone.base_path}-{path.rpartition('-')[2]}"
    os.symlink(path, link)
    os.lchown(link, STRANGER, STRANGER)
    assert alone.zygotes() == []
    assert has_torch(alone, forked=False) == f"{WITHOUT}{link} is a link of another user (uid {STRANGER})\n"


def test_only_zygotes_are_stopped(tmp_path: Path, world: World) -> None:
    """Another program of this user that listens in the place of a zygote stays."""
    base_path, reasons = str(tmp_path / "s"), []
    other = world.start(
        "-c",
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('up'); input()",
        f"{base_path}-key.zygote",
    )
    other.expect("up")
    assert stop_zygotes(base_path, reasons.append) == []
    assert f"(pid {other.pid}) did not answer as a zygote" in reasons[0]
    assert other.process.poll() is None


def test_a_directory_that_others_can_write_to_is_not_used(place: Place, tmp_path: Path) -> None:
    """They could put a socket there."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    errors = has_torch(Place(place.folder, open_to_all), forked=False)
    assert "other users can write to it" in errors


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", NESTED], ids=["length", "nested"])
def test_garbage_does_not_end_a_zygote(place: Place, zygote: int, sent: bytes) -> None:
    """It closes the connection, and keeps no descriptor of it."""
    before = len(links_of(zygote))
    with socket.socket(socket.AF_UNIX) as sock, open(os.devnull) as file:
        sock.connect(socket_of(place, zygote))
        socket.send_fds(sock, [sent], [file.fileno()])
        sock.shutdown(socket.SHUT_WR)
        answers = []
        with pytest.raises((Lost, ConnectionResetError)):
            while True:
                answers.append(receive(sock)[0]["type"])
    assert set(answers) <= {"Greeting", "ForkRefused"}
    eventually(lambda: len(links_of(zygote)) <= before)
    assert has_torch(place) == ""
    assert zygote in [one["pid"] for one in place.zygotes()]
