"""Workers of a Dask cluster; the only place that knows the extra `cluster`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.workers import GivenExecutor

_CONNECT_S = 10


@contextmanager
def cluster_workers(address: str) -> Iterator[GivenExecutor]:
    """Give the workers of the Dask scheduler at `address`, such as `tcp://host:8786`.

    Raises BadInputError where the extra is missing or no scheduler answers.
    """
    try:
        distributed = import_module("distributed")
    except ImportError as error:
        mend = "install the extra: pip install 'tonnage[cluster]'"
        raise BadInputError(f"--cluster needs Dask's distributed; {mend}") from error
    # What it would log, with tracebacks, comes back as the reason why points failed.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(address, timeout=_CONNECT_S)
    except (OSError, ValueError) as error:  # a time-out is an OSError
        reason = " ".join(str(error).split())
        raise BadInputError(f"--cluster {address}: no scheduler answers: {reason}") from error
    with client:
        # pure: a point that failed before would be answered from the cluster's memory.
        yield GivenExecutor(client.get_executor(pure=False))
