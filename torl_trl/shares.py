"""A rank's share of limits that are totals for its machine, or for a service that all machines use."""

import os
from typing import Any


def share_of_rank(options: dict[str, Any], *limits: str, ranks: str = "LOCAL_WORLD_SIZE") -> dict[str, Any]:
    """Divide the options `limits`, totals for the machine, by its ranks: numbers of something to at least 1.

    `ranks` is the variable that has the number of ranks: WORLD_SIZE for what all machines share.
    """
    count = int(os.environ.get(ranks, "1"))
    given = {limit: options[limit] for limit in limits if options.get(limit) is not None}
    return options | {
        limit: total / count if limit.endswith("_per_second") else max(1, total // count)
        for limit, total in given.items()
    }


def interpreter_options_of_rank(interpreter: str, options: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of the limits of a backend, which are totals for the machine, or for the remote service."""
    if interpreter == "embedded":
        return share_of_rank(options, "slots")
    return share_of_rank(options, "slots", "sandboxes", "creations_per_second", ranks="WORLD_SIZE")
