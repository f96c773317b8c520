"""Check the contents of sdist and wheel, built twice: ``python contents.py FIRST SECOND``, two folders with both."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

#: Contents of a wheel besides the package, below its folder of metadata.
_METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def check(first: Path, second: Path) -> None:
    """Compare the two builds with each other and with the tree; a difference is an AssertionError."""
    names = sorted(path.name for path in first.iterdir())
    wheel, sdist = next(first.glob("*.whl")), next(first.glob("*.tar.gz"))
    assert sorted(path.name for path in second.iterdir()) == names == sorted([wheel.name, sdist.name]), names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), f"{name} has other bytes the second time"
    files = _in_sdist(sdist)
    _check_sdist(files)
    _check_wheel(wheel, {name for name in files if name.startswith("shared_rpc/")})


def _in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def _check_sdist(files: set[str]) -> None:
    """A checkout and an unpacked sdist have the same files, so that a contributor's commands work in both."""
    if not Path(".git").exists() or shutil.which("git") is None:
        print("not a checkout: the files of the sdist are not compared with it")
        return
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    tree = {name for name in listed.stdout.split("\0") if Path(name).is_file()}
    assert tree - files == set(), f"the sdist lacks {sorted(tree - files)}"
    assert files - tree == {"PKG-INFO"}, f"the sdist has {sorted(files - tree)}, which git does not know"


def _check_wheel(wheel: Path, package: set[str]) -> None:
    """The wheel has the package, its typing marker and its licence, and nothing else: no tests, no documentation."""
    metadata = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    found = set(zipfile.ZipFile(wheel).namelist())
    expected = package | {metadata + name for name in _METADATA}
    assert found == expected, f"the wheel has and has not: {sorted(found - expected)}, {sorted(expected - found)}"
    assert "shared_rpc/py.typed" in found


if __name__ == "__main__":
    check(*map(Path, sys.argv[1:]))
