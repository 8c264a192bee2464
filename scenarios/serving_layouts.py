"""How the layout columns of serving results read: which GPUs share attention, and which experts.

`tp`, `attention_dp`, `moe_tp` and `moe_ep` describe the same GPUs twice, for attention and for
experts, and published files multiply what they should not: eight GPUs with tp 8 and ep 8 stand as
tp 64 = moe_tp 8 x moe_ep 8, eight attention-DP ranks as dp 64. Where the columns contradict each
other the smaller reading is the one that ran.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonnage.sim.domain import BadInputError, ParallelLayout

_SHORT = re.compile(r"(tp|tep|dp|dep)(\d+)")


@dataclass(frozen=True, slots=True)
class StatedLayout:
    """The layout columns of one phase of a row; `attention_dp` None is not stated."""

    tp: int
    pp: int = 1
    attention_dp: int | None = None
    moe_tp: int = 1
    moe_ep: int = 1

    def layout(self) -> ParallelLayout:
        """Return the layout that ran; raises BadInputError where there is none.

        Attention data parallelism is over all GPUs, and so are experts, in files that state it;
        in those that do not, the experts' GPUs beyond `tp` are what says that it is there.
        """
        if self.attention_dp is None:
            return self._plain()
        gpus = self._gpus()
        ranks = gpus if self.attention_dp > 1 else 1
        return ParallelLayout(gpus, self.pp, gpus if self.moe_ep > 1 else 1, ranks)

    def _gpus(self) -> int:
        assert self.attention_dp is not None
        product = self.tp * self.attention_dp
        if self.attention_dp > 1 and self.tp == self.attention_dp:
            return self.tp
        doubled = self.moe_tp == self.moe_ep > 1 and self.moe_tp * self.moe_ep == product
        return self.moe_tp if doubled else product

    def _plain(self) -> ParallelLayout:
        gpus = max(self.tp, self.moe_tp * self.moe_ep)
        if gpus % self.tp:
            raise BadInputError(
                f"{self.moe_tp} x {self.moe_ep} GPUs of experts are no multiple of tp {self.tp}"
            )
        return ParallelLayout(gpus, self.pp, self.moe_ep, gpus // self.tp)


def short_layout(text: str) -> ParallelLayout:
    """Return the layout of a short name: tp8, tep8 (whole experts), dp8 (attention-DP), dep8."""
    found = _SHORT.fullmatch(text)
    if found is None:
        raise BadInputError(f"layout {text!r} is not one of tp8, tep8, dp8 or dep8")
    kind, gpus = found[1], int(found[2])
    return ParallelLayout(gpus, 1, gpus if "e" in kind else 1, gpus if "d" in kind else 1)
