"""Processes that offer to make copies for a broker, and that a test holds at any step of one."""

from __future__ import annotations

from pathlib import Path

from tests.kit.processes import Child, eventually, python

#: Functions of the driver, in the order in which the copy of one segment comes to them first.
STEPS = ["cuStreamCreate", "cuMemCreate", "cuMemcpyAsync", "cuStreamDestroy"]

#: A driver that is made of host memory, which waits in a function while its name is in a file.
FAKE = """
import os, time
from tests.kit import fake_driver
fake_driver.install()
from cuda.bindings import driver

def held(name, function):
    def call(*arguments):
        def holds():
            try:
                with open({held!r}) as file:
                    return file.read() == name
            except FileNotFoundError:
                return False
        while holds():
            open({held!r} + f"-{{os.getpid()}}", "w").close()
            time.sleep(0.005)
        return function(*arguments)
    return call

for name in {steps!r}:
    setattr(driver, name, held(name, getattr(driver, name)))
"""

#: A process that does what it is told by lines.
OFFERING = """
import os, sys
from shared_rpc import Client

client = Client(socket_path={path!r})
offer = client.offer_copies()
print("offers", flush=True)
for line in sys.stdin:
    if line.strip() == "fork":
        if not os.fork():
            os.read(0, 1)  # until nobody has the other end
            os._exit(0)
        print("forked", flush=True)
        continue
    offer.close()
    print("closed", offer.active, flush=True)
"""


class Offering:
    """A process with an offer, once the server has it.

    :param fake: whether its driver is made of host memory.
    """

    def __init__(self, path: str, held: Path, children: list[Child], *, fake: bool = True) -> None:
        self._held = held
        code = FAKE.format(held=str(held), steps=STEPS) if fake else ""
        self.child = python(code + OFFERING.format(path=path))
        children.append(self.child)
        self.child.expect("offers")

    @property
    def pid(self) -> int:
        """The process id."""
        return self.child.pid

    def reaches(self) -> None:
        """Wait until it is held."""
        eventually(self._held.with_name(f"{self._held.name}-{self.pid}").exists, what=f"pid {self.pid} at a step")

    def close(self) -> None:
        """Have it close its offer, and wait for that."""
        self.child.tell("close")
        self.child.expect("closed False")


def fake_mappings(pid: int) -> int:
    """How many mappings a process has of a fake GPU's memory."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return sum("/memfd:fake-" in line for line in maps)
