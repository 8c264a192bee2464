"""One visit to a GPU, in parts: calibrate, then execute the ranks of large models and compare.

Every part has a budget and writes a file of its own when it is done (`--out`). A run that was ended
goes on with the first part that has none; a calibration goes on within its grid. Parts for which
no time is left in `--minutes` are left out, and the next run takes them up. After every part
`report.md` and `report.json` say what there is. On a CPU (`--device cpu`) the same parts run with
the laptop scenarios and seconds in place of minutes: it tries this program, not a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tonnage.calibrate.machines import catalogue_name, device_kind
from tonnage.calibrate.own import Calibration, calibrate
from tonnage.calibrate.sizes import CPU_QUICK, Sizes
from tonnage.execution import execute
from tonnage.execution_study import studied
from tonnage.output import json_text, plain, write_text
from tonnage.profile_tables import header_report
from tonnage.scenarios.load import load_scenario
from tonnage.session_report import report_of
from tonnage.sim.cost.profile import SUFFIX
from tonnage.sim.domain import BadInputError, InfeasibleError
from tonnage.step_devices import DeviceChoice, device_maker
from tonnage.watched_devices import Watch

Json = dict[str, Any]

LEAST_S = 10.0  # no part is begun with less time than this


@dataclass(frozen=True, slots=True)
class Part:
    """Something to run, and its share of the time. Without a scenario it is the calibration."""

    name: str
    title: str
    budget_s: float
    scenario: str | None = None
    overrides: tuple[str, ...] = ()
    tags: bool = False
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """The parts of a device, in the order of running, and the models of its calibration.

    `compared`: parts of which the first is shown over the second.
    """

    parts: tuple[Part, ...]
    models: tuple[str, ...]
    compared: tuple[str, str]
    minutes: float
    sizes: Sizes | None = None


_KIMI, _GLM, _GLM_FP8 = "kimi-k2.6-h200", "glm-5.2-h200", "glm-5.2-h200-fp8"
_LAYERS = 16  # of a rank: each kind several times; the others' weights would take minutes to make
_TAGS = ("pools.decode.integrity=batched",)
_FEW = ("traffic.requests=8", "traffic.output_tokens=16", "traffic.concurrency=[1, 4]")
# So few that a CPU measures them in a quarter of a minute: enough to predict from, and no more.
_TINY = replace(
    CPU_QUICK,
    rows=(1, 4, 16, 64, 256),
    generic_rows=(1, 16, 256),
    generic_widths=(512, 2048),
    generic_formats=("bf16",),
    tokens=(1, 4, 16, 64, 256),
    generic_experts=(),
    batches=(1, 4),
    contexts=(1, 128, 512),
    generic_heads=((16, 8, 64),),
    generic_latent_heads=(8,),
    prompts=((1, 64), (1, 256), (4, 256)),
    small_rows=(1, 16, 256),
    small_widths=(64, 2048),
    checked_pages=((1, 128), (8, 128), (32, 4096)),
    moved_tokens=(1, 64, 1024),
    samples=3,
    sample_s=1e-3,
    budget_s=0.05,
    repeats=0,
)
VISITS: Mapping[str, Visit] = {
    "cuda": Visit(
        (
            Part("calibrate", "Calibration, full grid", 300.0),
            Part("kimi", "Kimi K2.6, one TP8 rank", 75.0, _KIMI, layers=_LAYERS),
            Part("glm_fp8", "GLM-5.2, FP8 weights", 60.0, _GLM_FP8, layers=_LAYERS),
            Part("glm_int4", "GLM-5.2, INT4 weights", 60.0, _GLM, layers=_LAYERS),
            Part("tags", "Kimi K2.6 with page tags", 45.0, _KIMI, _TAGS, True, _LAYERS),
        ),
        (_KIMI, _GLM, _GLM_FP8),
        ("glm_int4", "glm_fp8"),
        minutes=12.0,
    ),
    "cpu": Visit(
        (
            Part("calibrate", "Calibration, a tiny grid", 40.0),
            Part("laptop_gqa", "laptop-gqa", 2.0, "laptop-gqa", _FEW),
            Part(
                *("laptop_bf16", "laptop, BF16 weights", 2.0, "laptop"),
                (*_FEW, "pools.decode.weights=native"),
            ),
            Part("laptop_int4", "laptop, INT4 experts", 2.0, "laptop", _FEW),
            Part("tags", "laptop with page tags", 2.0, "laptop", (*_FEW, *_TAGS), True),
        ),
        ("laptop", "laptop-gqa"),
        ("laptop_int4", "laptop_bf16"),
        minutes=5.0,
        sizes=_TINY,
    ),
}


class Session:
    """Runs the parts of a visit that a folder has no result of."""

    def __init__(self, device: str, folder: Path, minutes: float | None) -> None:
        """Check the device, and that the folder holds no other machine's results."""
        from tonnage.kernels.machine import check_device
        from tonnage.kernels.provenance import provenance

        self.device, self.folder = device, folder
        self.visit = VISITS[device_kind(device)]
        self.gpu = catalogue_name(device, check_device(device))
        self.machine = asdict(provenance(device, 1))
        allowed = self.visit.minutes if minutes is None else minutes
        self._ends_s = time.monotonic() + 60.0 * allowed - self._spent_s()

    @property
    def profile(self) -> Path:
        """Where the calibration puts its profile."""
        return self.folder / f"{self.gpu}-tonnage{SUFFIX}"

    def run(self) -> bool:
        """Run what is left; say whether every part is done and none has failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in self.visit.parts:
            if part.name in self._results():
                print(f"{part.name}: done before", flush=True)
                continue
            left_s = self._ends_s - time.monotonic()
            if left_s < LEAST_S:
                print(f"{part.name}: no time is left; run it again", flush=True)
                continue
            self._run_part(part, min(part.budget_s, left_s))
            self._write_report()
        self._write_report()
        found = self._results()
        return all(part.name in found for part in self.visit.parts)

    def _run_part(self, part: Part, budget_s: float) -> None:
        """Run one part; what it raises is told and does not keep the others from running."""
        print(f"{part.name}: up to {budget_s:.0f} s of measuring", flush=True)
        begun_s = time.monotonic()
        self._failure(part).unlink(missing_ok=True)
        try:
            if part.scenario is None:
                found = self._calibration(budget_s)
            else:
                found = self._execution(part, budget_s)
        except Exception as error:  # one part must not keep the others from being run
            told = f"{type(error).__name__}: {error}"
            write_text(self._failure(part), f"{told}\n")
            print(f"{part.name}: failed: {told}", flush=True)
            return
        spent_s = time.monotonic() - begun_s
        result = {
            "part": part.name,
            "title": part.title,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "wall_s": round(spent_s, 1),
            "budget_s": round(budget_s, 1),
            "result": plain(found),
        }
        write_text(self.folder / f"{part.name}.json", json_text(result) + "\n")
        print(f"{part.name}: done in {spent_s:.0f} s", flush=True)

    def _calibration(self, budget_s: float) -> Json:
        asked = Calibration(
            self.device,
            self.visit.models,
            sizes=self.visit.sizes,
            out=self.profile,
            log=self.folder / "calibration.jsonl",
            budget_s=budget_s,
        )
        done = calibrate(asked, _told())
        report: Json = done.report()
        return {"calibration": report, **header_report(done.profile, done.place)}

    def _execution(self, part: Part, budget_s: float) -> Json:
        place = self.profile if self.profile.is_dir() else "auto"
        scenario = load_scenario(str(part.scenario), [*part.overrides, f"profile={place}"])
        choice = DeviceChoice(self.device, layers=part.layers, check_tags=part.tags)
        watch = Watch.of(scenario, choice, budget_s)
        report = execute(
            scenario, watch.devices(device_maker(choice)), budget_s=budget_s, progress=_told()
        )
        return studied(scenario, report, watch).to_dict()

    # --- files ----------------------------------------------------------------------------------

    def _failure(self, part: Part) -> Path:
        return self.folder / f"{part.name}.failed.txt"

    def _results(self) -> dict[str, Json]:
        """Return the results that are there, by part; refuses those of another machine."""
        found: dict[str, Json] = {}
        for part in self.visit.parts:
            path = self.folder / f"{part.name}.json"
            if not path.exists():
                continue
            result: Json = json.loads(path.read_text(encoding="utf-8"))
            for name in ("device", "driver", "torch", "triton"):
                if result["machine"][name] != self.machine[name]:
                    raise BadInputError(
                        f"{path}: measured with {name} {result['machine'][name]}, and this is "
                        f"{self.machine[name]}; name another folder with --out"
                    )
            found[part.name] = result
        return found

    def _spent_s(self) -> float:
        return sum(float(one["wall_s"]) for one in self._results().values())

    def _write_report(self) -> None:
        failures = {
            part.name: self._failure(part).read_text(encoding="utf-8").strip()
            for part in self.visit.parts
            if self._failure(part).exists()
        }
        titles = {part.name: part.title for part in self.visit.parts}
        found = self._results()
        whole = {
            "machine": self.machine,
            "gpu": self.gpu,
            "parts": found,
            "failed": failures,
            "missing": [name for name in titles if name not in found],
        }
        write_text(self.folder / "report.json", json_text(whole) + "\n")
        write_text(self.folder / "report.md", report_of(whole, titles, self.visit.compared))


def _told() -> Any:
    """Return what prints progress, a line every few seconds."""
    last_s = 0.0

    def report(text: str, share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > 5.0:
            last_s = time.monotonic()
            print(f"  {text}", flush=True)

    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; 0 when all is done, 1 when parts are left, 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="default: out/session-DEVICE")
    parser.add_argument("--minutes", type=float, default=None, help="in all, parts done before too")
    asked = parser.parse_args(arguments)
    try:
        folder = asked.out or Path("out") / f"session-{device_kind(asked.device)}"
        session = Session(asked.device, folder, asked.minutes)
        done = session.run()
    except (BadInputError, InfeasibleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder / 'report.md'}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
