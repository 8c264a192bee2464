"""Numeric error of formats on synthetic tensors, or on those of a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    import torch

Kind = Literal["weights", "kv"]
OUTLIER_SHARES = (0.0, 0.001, 0.01)
OUTLIER_SCALE = 20.0
_SYNTHETIC = (128, 4096)
_MOST_ROWS = 256  # of a tensor that are read: a million values and more, seconds on a laptop
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """One tensor: what it is like, and its errors by format; None where a format refuses it."""

    name: str
    shape: tuple[int, ...]
    rows_read: int
    values: dict[str, float]
    errors: dict[str, dict[str, float] | None]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the tensor."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """The tensors measured, and those left out with the reason."""

    kind: Kind
    source: str
    tensors: tuple[TensorErrors, ...]
    skipped: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `numeric_errors`."""
        return {
            "kind": self.kind,
            "source": self.source,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "skipped": self.skipped,
        }


def synthetic_errors(kind: Kind) -> ErrorReport:
    """Return the errors on Gaussian values with no, few and many outliers."""
    _require_torch()
    from tonnage.kernels.quantise.errors import synthetic

    tensors = []
    for share in OUTLIER_SHARES:
        values = synthetic(*_SYNTHETIC, share, OUTLIER_SCALE)
        name = "Gaussian" if share == 0 else f"Gaussian, {share:.1%} x {OUTLIER_SCALE:g}"
        tensors.append(_measured(name, _SYNTHETIC, values, kind))
    return ErrorReport(kind, "synthetic", tuple(tensors), {})


def file_errors(
    path: Path, kind: Kind, progress: Callable[[str, float], None] | None = None
) -> ErrorReport:
    """Return the errors on the tensors of a safetensors file; quantised and small ones are skipped.

    Of each tensor the first rows are read, and a scale per tensor is that of those. Raises
    BadInputError for a file that cannot be read, or that holds no tensor to measure.
    """
    _require_torch()
    skipped: dict[str, str] = {}
    tensors = []
    for name, shape, values, share in _read(path, skipped):
        if progress is not None:
            progress(name, share)
        tensors.append(_measured(name, shape, values, kind))
    if not tensors:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise BadInputError(f"--tensors {path}: no tensor to measure ({why or 'it holds none'})")
    return ErrorReport(kind, str(path), tuple(tensors), skipped)


def _measured(name: str, shape: tuple[int, ...], values: torch.Tensor, kind: Kind) -> TensorErrors:
    from tonnage.kernels.quantise import errors

    formats = errors.WEIGHT_FORMATS if kind == "weights" else errors.KV_FORMATS
    found = errors.numeric_errors(values, formats)
    return TensorErrors(
        name,
        shape,
        values.shape[0],
        asdict(errors.tensor_shape(values)),
        {label: None if error is None else asdict(error) for label, error in found.items()},
    )


def _read(
    path: Path, skipped: dict[str, str]
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor, float]]:
    """Yield name, shape, first rows `[rows, k]` of every tensor that can be measured, and progress.

    Progress is the share of the file's tensors that came before.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        mend = "install it with: pip install 'tonnage[tensors]'"
        raise BadInputError(f"--tensors: needs the package safetensors; {mend}") from error
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            for index, name in enumerate(names):
                view = file.get_slice(name)
                shape = tuple(view.get_shape())
                if view.get_dtype() not in _FLOATS:
                    skipped[name] = f"{view.get_dtype()} is stored, not BF16, FP16 or FP32"
                elif len(shape) < 2 or min(shape) == 0:
                    skipped[name] = "it has no rows"
                else:
                    values = _rows(view[: _leading(shape)])
                    if values.isfinite().all():
                        yield name, shape, values, index / len(names)
                    else:
                        skipped[name] = "it holds values that are not finite"
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"--tensors {path}: cannot be read as safetensors: {error}") from error


def _leading(shape: tuple[int, ...]) -> int:
    """Return how much of the first dimension holds `_MOST_ROWS` rows, 1 at least."""
    rows_of_one = 1
    for size in shape[1:-1]:
        rows_of_one *= size
    return max(1, _MOST_ROWS // rows_of_one)


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1])[:_MOST_ROWS].float()


def _require_torch() -> None:
    try:
        import torch  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        mend = "install it with: pip install 'tonnage[tensors]'"
        raise BadInputError(f"quality: numeric errors need torch; {mend}") from error
