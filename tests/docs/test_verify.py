"""``shared-rpc verify``: it passes where sharing works, fails where it does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared_rpc.extras import verify as running
from shared_rpc.extras.verification.stage import marked
from shared_rpc.extras.verify import CHECKS, SCHEMA, Outcome, Report
from tests.kit.commands import cli
from tests.kit.deep import deep
from tests.kit.processes import PYTHONPATH

pytestmark = pytest.mark.timeout(300)

SMALL = ("--size", "16MiB", "--workers", "2")
NAMES = list(CHECKS)

#: By subject: the checks that it fails, and what these expected or found.
BROKEN = {
    "Copying": {"sharing": ["use one model", "see all writes"]},
    "Changeable": {"kills": ["worker: all compute", "server: attached processes compute", "1 after"]},
    "Careless": {"sharing": ["writes to read-only memory"]},
    "Leaking": {"lifetimes": ["leases", "descriptors", "bytes"]},
    "Haunting": {"lifetimes": ["more bytes"]},
}

#: Verifies with such a subject, as a program without a main module that could be imported again.
PROGRAM = """
import json, sys
from shared_rpc.extras.verify import Settings, verify
_, subject, *names = sys.argv
settings = Settings("cpu", 2, 32 << 20, names, f"tests.kit.verify_subjects:{subject}")
report = verify(settings)
assert not report.passed
print(json.dumps(report.as_json()))
"""


class Verification:
    """A running ``shared-rpc verify`` with its own directory for temporary files."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        stderr: int = subprocess.PIPE,
        program: Sequence[str] = ("-m", "shared_rpc.cli", "verify"),
        **environ: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *program, *options],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def processes(self) -> list[int]:
        """Its descendants."""
        return [pid for pid in marked(f"{self.folder}/shared-rpc-verify-") if pid != self.process.pid]

    def end(self) -> tuple[int, str, str]:
        """Wait for its end, and check for leftovers; return exit code, output and errors."""
        output, errors = self.process.communicate(timeout=240)
        assert self.processes() == []
        assert list(self.folder.iterdir()) == []
        return self.process.returncode, output, errors


@pytest.fixture
def hangups() -> Iterator[None]:
    """Child processes handle SIGHUP, even if the tests were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A directory with a name short enough for sockets, however long pytest's are."""
    with tempfile.TemporaryDirectory(prefix="v-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start(hangups: None, scratch: Path) -> Iterator[Callable[..., Verification]]:
    """``start(*options)`` runs the command; those still running at the end are killed."""
    started: list[Verification] = []

    def begin(*options: str, stderr: int = subprocess.PIPE, **environ: str) -> Verification:
        started.append(Verification(Path(tempfile.mkdtemp(dir=scratch)), *options, stderr=stderr, **environ))
        return started[-1]

    yield begin
    for verification in started:
        if verification.process.poll() is None:
            verification.process.kill()
        for pid in verification.processes():
            os.kill(pid, signal.SIGKILL)
        verification.process.communicate()


def test_all_checks_pass(start: Callable[..., Verification]) -> None:
    """Two processes use one model and built one, and a killed client frees its memory."""
    code, output, errors = start("--device", "cpu", "--json", *SMALL).end()
    whole: dict[str, Any] = json.loads(output)
    assert (code, errors, [problem for check in whole["checks"] for problem in check["problems"]]) == (0, "", [])
    assert whole["schema"] == SCHEMA
    assert (whole["device"]["device"], whole["device"]["mechanism"]) == ("cpu", "memfd")
    assert (whole["workers"], whole["model_bytes"], whole["passed"]) == (2, 16 << 20, True)
    assert [(check["name"], check["passed"]) for check in whole["checks"]] == [(name, True) for name in NAMES]
    for check in whole["checks"]:
        assert check["found"] and check["title"] and 0 < check["seconds"] < whole["seconds"]


@pytest.mark.parametrize("subject", BROKEN)
def test_a_check_fails_on_a_broken_guarantee(start: Callable[..., Verification], subject: str) -> None:
    """It reports the expected and the found values, and the remedy."""
    code, output, errors = start(subject, *BROKEN[subject], program=("-c", PROGRAM)).end()

    assert (code, errors) == (0, "")
    for check in json.loads(output)["checks"]:
        assert not check["passed"]
        for complaint in BROKEN[subject][check["name"]]:
            assert any(complaint in text for problem in check["problems"] for text in problem.values()), check["problems"]
        assert check["advice"] and all(problem["expected"] and problem["found"] for problem in check["problems"])


def test_an_aborted_check_fails_and_keeps_its_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, the next one runs."""
    stage: Any = SimpleNamespace(ensure_server=lambda: None, dismiss=lambda: None)

    def breaks(stage: Any, outcome: Outcome) -> None:
        outcome.found.append("half")
        raise RuntimeError("no such luck")

    monkeypatch.setitem(CHECKS, "breaks", ("breaks off", "", breaks))

    outcome = running._run_check("breaks", stage)

    assert (outcome.passed, outcome.found[0]) == (False, "half")
    assert outcome.problems[0]["found"] == "RuntimeError: no such luck"


def test_a_failure_is_told_to_people_and_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With expectation, finding and remedy below the table; the exit code is 1."""
    outcome = Outcome("sharing", "one model", "look for copies", seconds=1.0, found=["many"])
    outcome.require(False, "one model", "two models")
    device = {"name": "host memory", "mechanism": "memfd", "torch": "2"}
    monkeypatch.setattr(running, "verify", lambda *_: Report(device, 2, 1 << 20, 2.0, [outcome], ["a traceback"]))
    ran = cli("verify")
    assert ran.code == 1
    assert all(text in ran.output for text in ("one model", "two models", "look for copies", "a traceback"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "tpu"), "device='tpu'"),
        (("--device", "cpu", "--size", "900T"), "choose a smaller --size"),
        (("--check", "all"), "use sharing, "),
    ],
)
def test_impossible_verifications_have_exit_code_2(options: tuple[str, ...], said: str) -> None:
    """One line gives the reason, in JSON too."""
    ran = cli("verify", *options, "--json")
    assert ran.code == 2
    (line,) = ran.errors.splitlines()
    assert line.startswith("shared-rpc: cannot verify: ") and said in line
    assert json.loads(ran.output).keys() == {"schema", "error"}


@pytest.mark.parametrize("check", [NAMES[-1], *deep(*NAMES[:-1])])
def test_a_signal_during_a_check_leaves_nothing(start: Callable[..., Verification], check: str) -> None:
    """On a terminal, which shows the title of the check."""
    screen, terminal = pty.openpty()
    with os.fdopen(screen, "rb", buffering=0) as shown:
        verification = start("--device", "cpu", "--check", check, *SMALL, stderr=terminal)
        os.close(terminal)
        seen = b""
        while CHECKS[check][0].encode() not in seen:
            seen += shown.read(4096)

        verification.process.send_signal(signal.SIGHUP)

        # It would block on a terminal that is not read.
        with pytest.raises(OSError):
            while shown.read(4096):
                continue
        code, output, _ = verification.end()
    assert (code, output) == (128 + signal.SIGINT, "")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_all_checks_pass_on_a_gpu(start: Callable[..., Verification]) -> None:
    """With separate contexts in all processes; a model small enough for any GPU, and larger than the noise."""
    code, output, errors = start(*("--device", "cuda", "--json", "--size", "512MiB", "--workers", "2")).end()

    assert errors == ""
    document = json.loads(output)
    assert [check["problems"] for check in document["checks"] if not check["passed"]] == []
    assert (code, document["passed"], document["device"]["device"]) == (0, True, "cuda:0")
