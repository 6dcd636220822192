"""A checkout that needs a private index: it demands a login, and redirects downloads to another host."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.integration import wheels
from tests.integration.checkout import Checkout
from tests.integration.index import Index

CPU, CPU_EXTRA = "ty-1.0-cpu-py311", "ty-1.0-cpu-py311-extra"
PRIVATE = ("tinyextra", "tinyinner")


@dataclass
class Company:
    """A checkout whose extra component, and whose framework on the CPU, come from a private index.

    `public` is the default index; the private `index` redirects downloads to `storage`, which demands no login.
    """

    checkout: Checkout
    public: Index
    index: Index
    storage: Index
    password: str
    start: int = 0
    authorized: int = 0

    def asked_in_public(self) -> list[str]:
        """The paths of requests for private packages to the default index, since the start."""
        return [path for path in self.public.answered[self.start :] if path.split("/")[2] in PRIVATE]

    def has_password(self, content: bytes) -> bool:
        """Whether the password is there, plain or as in a header of a request."""
        encoded = base64.b64encode(f"__token__:{self.password}".encode())
        return self.password.encode() in content or encoded in content


@contextmanager
def company(checkout: Checkout) -> Iterator[Company]:
    """Gives a checkout a private index."""
    index = checkout.index
    release, extra = checkout.release, checkout.extra
    with ExitStack() as stack:
        private, storage = stack.enter_context(Index().serving()), stack.enter_context(Index().serving())
        new = Company(checkout, index, private, storage, secrets.token_hex(12))
        # The default index has all of their names too, in higher versions.
        index.publish(wheels.extra("99.0"), wheels.wheel("tinyinner", "99.0", {"tinyinner.py": b""}))
        for place in (private, storage):
            place.publish(
                wheels.wheel(
                    "tinyextra", f"{extra}+co", {"tinyextra/__init__.py": b'VERSION = "1"\n'}, requires=["tinyinner"]
                ),
                wheels.wheel("tinyinner", "1.0", {"tinyinner.py": b""}),
                wheels.framework(f"{release}+cpu", requires=["tinyinner"]),
                # Packages of the default index must not come from here either.
                wheels.driver_library("99.0"),
            )
        checkout.environ["UV_INDEX_COMPANY_PASSWORD"] = new.password
        private.login, private.storage = ("__token__", new.password), storage
        checkout.edit("matrix.yaml", "debian:\n", f"indexes:\n  company: {private.url}\ndebian:\n")
        checkout.edit("matrix.yaml", '  "12.8": {}\n', '  "12.8": {}\n  cpu: {}\n')
        checkout.edit("matrix.yaml", "    image: ty-cuda\n", "    image: ty-cuda\n    cpu_image: ty-cpu\n")
        checkout.edit("matrix.yaml", 'cuda: ["12.8"]', 'cuda: ["12.8", cpu], index_on: {cpu: company}')
        checkout.edit(
            "matrix.yaml", f"packages: [tinyextra=={extra}]", "packages: [tinyextra, tinyinner], index: company"
        )
        new.start, new.authorized = len(index.answered), len(index.authorized)
        yield new
        index.withdraw("tinyextra", "99.0")  # the index is shared with other tests
