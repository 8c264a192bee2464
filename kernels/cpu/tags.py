"""The page-tag check and the kernel that does nothing, on a CPU."""

from __future__ import annotations

import torch

from tonnage.kernels.spec import Inputs, Outputs


def check(inputs: Inputs) -> Outputs:
    """Count every request's wrong entries and name the first. Inputs as in `ops.tag_check`."""
    table, tags = inputs["page_table"], inputs["live_tags"]
    requests, width = table.shape
    if width == 0 or requests == 0:
        nothing_wrong = torch.zeros(requests, dtype=torch.int32)
        return {"mismatches": nothing_wrong, "first_bad": nothing_wrong.clone()}
    position = torch.arange(width, dtype=torch.int32)
    known = (table >= 0) & (table < len(tags))
    page = torch.where(known, table, 0).flatten()
    live = tags.index_select(0, page).view(requests, width)
    bad = (live != inputs["ledger_tags"]) | (table != inputs["ledger_pages"]) | ~known
    bad &= position < inputs["page_counts"][:, None]
    first = torch.where(bad, position, width).amin(1)
    return {"mismatches": bad.sum(1, dtype=torch.int32), "first_bad": first.int()}


def nothing(inputs: Inputs) -> Outputs:
    """Return the tensor as it is."""
    return dict(inputs)
