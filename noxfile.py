"""Everything a contributor runs: ``python3 -m nox -s lint types tests docs demo``."""

from __future__ import annotations

import shutil
import subprocess

import nox

nox.options.sessions = ["lint", "types", "tests", "docs", "demo"]
nox.options.reuse_existing_virtualenvs = True
# pip sees where a CPU build of torch may lie; other installers may not look there.
nox.options.default_venv_backend = "virtualenv"

CONSTRAINTS = ("-c", "constraints.txt")

#: The versions of Python that are supported.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    session.install("ruff==0.17.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """The package strictly, and the public types as a user sees them."""
    session.install("torch", "-e", ".[test]", "mypy==2.4.1", *CONSTRAINTS)
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that need no GPU; ``nox -s tests -- -m gpu`` for the others."""
    _test(session)


@nox.session(python=False)
def pythons(session: nox.Session) -> None:
    """The same on every supported Python that is found here: as ``python3.13`` and so on, which must start."""
    found = [version for version in PYTHONS if _starts(f"python{version}")]
    if not found:
        session.error(f"none of {', '.join(f'python{version}' for version in PYTHONS)} is found: add one to PATH")
    session.log(f"found: {', '.join(found)}; not found: {', '.join(sorted({*PYTHONS} - {*found})) or 'none'}")
    for version in found:
        session.notify(f"tests_on-{version}", session.posargs)


@nox.session(python=PYTHONS)
def tests_on(session: nox.Session) -> None:
    """All tests that need no GPU on one Python: ``nox -s tests_on-3.13``."""
    _test(session)


def _test(session: nox.Session) -> None:
    session.install("torch", "-e", ".[test,examples]", *CONSTRAINTS)
    # The peer of the benchmarks. It asks for an old numpy, which it does not use.
    session.install("--no-deps", "shared-tensor==0.2.16")
    session.run("pytest", *(session.posargs or ("-m", "not gpu")))


def _starts(program: str) -> bool:
    """Whether a program is there and runs; what a version manager puts in its place may do neither."""
    path = shutil.which(program)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0


@nox.session
def compat(session: nox.Session) -> None:
    """Other people's libraries over shared memory; ``nox -s compat -- -k Llama`` for some, ``--device cuda`` on a GPU."""
    # Nothing here needs --no-deps: all of them are content with the torch of the constraints, and pip fetches no other. The
    # wheels of torchvision are built for CUDA, which tests/compat/site/ sees to.
    session.install("torch", "-e", ".[compat]", *CONSTRAINTS)
    session.run("pytest", "tests/compat", "--require-all", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on real weights, the other scenarios, and the verification: each fails if something it claims is false."""
    session.install("torch", "-e", ".[examples]", *CONSTRAINTS)
    session.run("python", "examples/semantic_search_demo.py", *session.posargs)
    for example in ("weight_manager", "prefill_decode", "tensor_parallel", "fastapi_workers"):
        session.run("python", f"examples/{example}/run.py")
    session.run("shared-rpc", "verify", "--device", "cpu")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, every warning an error, into docs/_build/html; and the doctests in it."""
    session.install("torch", "-e", ".[docs]", *CONSTRAINTS)
    for builder in ("html", "doctest"):
        session.run(
            "sphinx-build",
            "-n",
            "-W",
            "--keep-going",
            "-q",
            "-b",
            builder,
            "-d",
            "docs/_build/doctrees",
            "docs",
            f"docs/_build/{builder}",
        )


@nox.session
def pictures(session: nox.Session) -> None:
    """The pictures of the command line in docs/_static/cli, taken anew; ``nox -s pictures -- ls info`` for some."""
    session.install("torch", "-e", ".", "pyte>=0.8", *CONSTRAINTS)
    session.run("python", "-m", "docs.pictures", *session.posargs)
