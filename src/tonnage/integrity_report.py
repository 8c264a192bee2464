"""`tonnage integrity`: what checks of KV find in a scenario's pools, cost, and save in a year."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import beta

from tonnage import api
from tonnage.explain import StepShape
from tonnage.injection import LengthPairs
from tonnage.integrity_costs import integrity_costs
from tonnage.integrity_study import (
    AS_WRITTEN,
    CHECKS,
    DEFAULT_CHECKS,
    FAMILIES,
    StudyTask,
    Told,
    family_of,
    lengths_of,
    study,
)
from tonnage.pools import BuiltPool, built_pools, deployment_of, times_of, token_role
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import BadInputError, Coverage, IntegritySpec
from tonnage.sim.planning.integrity_risk import FaultRate, fleet_risk
from tonnage.sim.serving.data_faults import FaultClass
from tonnage.sim.serving.physical import TAG_BITS
from tonnage.sim.serving.tag_wrap import chance_text, wrap_chance

CONFIDENCE = 0.95
_DAY_S, _HOUR_S = 86_400.0, 3600.0
_SUMS = ("injected", "caught_before", "caught_after", "missed", "aborted", "lost", "stops")
NOTES = (
    "injections: a small copy of the pools, 96 pages a rank, the scenario's lengths scaled to it",
    "shares are of the faults that led to something: caught, or read wrongly",
    "a year: every fault counts as one wrong read where it is not caught, the cautious case",
    "real pages: tonnage execute SCENARIO --inject all",
    "what aborts do to users, and retries to the fleet: docs/retries.md",
)


@dataclass(frozen=True, slots=True)
class IntegritySettings:
    """What is injected, how often, and for which fleet a year is counted.

    `checks`: of `integrity_study.CHECKS`; None: the four kinds, and the scenario's own where its
    pools have one. `requests_per_day`: None for what the scenario offers, or its pools serve.
    """

    injections: int = 200
    classes: tuple[FaultClass, ...] = tuple(FaultClass)
    checks: tuple[str, ...] | None = None
    requests_per_day: float | None = None
    fault_rate: float = 1e-9
    workers: int = 2

    def __post_init__(self) -> None:
        if self.injections < 1:
            raise BadInputError(f"--injections {self.injections}: inject 1 or more")
        if self.requests_per_day is not None and not 0 < self.requests_per_day < float("inf"):
            raise BadInputError(
                f"--requests-per-day {self.requests_per_day:g}: write a number above 0"
            )
        if not 0 < self.fault_rate <= 1:
            raise BadInputError(
                f"--fault-rate {self.fault_rate:g}: a probability per request, above 0, at most 1"
            )
        for name in self.checks or ():
            if name not in CHECKS:
                raise BadInputError(f"checks: {name!r}; use {', '.join(CHECKS)}")

    def checks_for(self, scenario: Scenario) -> tuple[str, ...]:
        """Return the checks to study."""
        if self.checks is not None:
            return self.checks
        own = {section.integrity.spec() for section in scenario.pools.named().values()}
        known = {CHECKS[name] for name in DEFAULT_CHECKS}
        is_another = len(own) > 1 or not own <= known
        return (*DEFAULT_CHECKS, AS_WRITTEN) if is_another else DEFAULT_CHECKS


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """What each check found of each class of faults, what it costs, and a fleet's year.

    `rows`: by check and class; a class that cannot happen in these pools has none. `costs`: by
    check, as `integrity_costs`. `coverage`: by pool, which places its own check compares.
    """

    scenario: Scenario
    settings: IntegritySettings
    checks: tuple[str, ...]
    shape: StepShape
    coverage: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    impossible: tuple[str, ...]
    costs: Mapping[str, Mapping[str, Any]]
    tag_wrap: Mapping[str, Any]
    year: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `integrity` verb."""
        return {
            "scenario": self.scenario.resolved(),
            "provenance": dict(self.provenance),
            "settings": {
                "injections": self.settings.injections,
                "classes": [str(kind) for kind in self.settings.classes],
                "checks": list(self.checks),
                "fault_rate": self.settings.fault_rate,
                "confidence": CONFIDENCE,
            },
            "step": asdict(self.shape),
            "coverage": self.coverage,
            "matrix": list(self.rows),
            "impossible": list(self.impossible),
            "costs": self.costs,
            "tag_wrap": self.tag_wrap,
            "year": self.year,
            "client_attempts": self.scenario.clients.attempts,
            "notes": list(NOTES),
        }


def integrity(
    scenario: Scenario, settings: IntegritySettings | None = None, *, progress: Told | None = None
) -> IntegrityReport:
    """Inject faults into a small copy of a scenario's pools, and say what checks find and cost.

    The same seed gives the same report, whatever the number of workers. Raises as `memory` does.
    """
    reports = integrity_reports({"": scenario}, settings or IntegritySettings(), progress)
    return reports[""]


def integrity_reports(
    scenarios: Mapping[str, Scenario], settings: IntegritySettings, progress: Told | None = None
) -> dict[str, IntegrityReport]:
    """Return the reports of several scenarios; what comes out the same for two is run once."""
    cases = {label: _Case.of(scenario, settings) for label, scenario in scenarios.items()}
    tasks = [task for case in cases.values() for task in case.tasks]
    found = study(tasks, settings.workers, progress)
    return {
        label: case.report([found[task.key]["row"] for task in case.tasks])
        for label, case in cases.items()
    }


@dataclass(frozen=True, slots=True)
class _Case:
    """One scenario, ready: it is told what is wrong with it before anything is injected."""

    scenario: Scenario
    settings: IntegritySettings
    pools: dict[Role, BuiltPool]
    lengths: LengthPairs
    shape: StepShape
    explained: Mapping[str, Any]
    tasks: tuple[StudyTask, ...]

    @classmethod
    def of(cls, scenario: Scenario, settings: IntegritySettings) -> _Case:
        pools = built_pools(scenario)
        lengths = lengths_of(scenario.traffic_spec(), scenario.seed)
        prompt, answer = _means(lengths)
        context = prompt + answer // 2
        explained = api.explain(scenario, context_tokens=context, prompt_tokens=prompt)
        decoding = next(one for one in explained["steps"].values() if one["requests"])
        shape = StepShape(decoding["requests"], context, prompt)
        tasks = tuple(
            StudyTask(scenario, check, kind, settings.injections, lengths)
            for check in settings.checks_for(scenario)
            for kind in settings.classes
        )
        return cls(scenario, settings, pools, lengths, shape, explained, tasks)

    def report(self, found: Sequence[Mapping[str, Any] | None]) -> IntegrityReport:
        """Put together what was found, in the order of the tasks."""
        scenario, settings = self.scenario, self.settings
        checks = settings.checks_for(scenario)
        rows = [
            _matrix_row(task.check, task.kind, row)
            for task, row in zip(self.tasks, found, strict=True)
            if row is not None
        ]
        happened = {row["class"] for row in rows}
        specs = {name: CHECKS[name] for name in checks}
        costs = integrity_costs(scenario, self.pools, self.shape, specs)
        serving = _serving(self)
        return IntegrityReport(
            scenario,
            settings,
            checks,
            self.shape,
            {str(role): _coverage(pool.spec.integrity) for role, pool in self.pools.items()},
            rows,
            tuple(str(kind) for kind in settings.classes if kind not in happened),
            {name: _with_losses(cost) for name, cost in costs.items()},
            serving["tag_wrap"],
            _year(settings, rows, serving, scenario),
            self.explained["provenance"],
        )


def _means(lengths: LengthPairs) -> tuple[int, int]:
    prompt, answer = np.mean(lengths, axis=0).tolist()
    return max(1, round(prompt)), max(1, round(answer))


# --- parts of a report --------------------------------------------------------------------------


def _matrix_row(check: str, kind: FaultClass, row: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: value for name, value in row.items() if name not in ("kind", "pool")}
    place = {"check": check, "class": str(kind), "family": family_of(kind), "pool": row["pool"]}
    return place | counts | _shares(row)


def _shares(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the shares caught of the faults that led to something, None where none did.

    The interval of those caught before the first wrong read is Clopper and Pearson's, exact.
    """
    before, after = counts["caught_before"], counts["caught_after"]
    harmful = before + after + counts["missed"]
    if not harmful:
        return {"before_share": None, "late_share": None, "before_interval": None}
    tail = (1.0 - CONFIDENCE) / 2.0
    rest = harmful - before
    low = float(beta.ppf(tail, before, rest + 1)) if before else 0.0
    high = float(beta.ppf(1.0 - tail, before + 1, rest)) if rest else 1.0
    return {
        "before_share": before / harmful,
        "late_share": after / harmful,
        "before_interval": [low, high],
    }


_UNCOVERED = {
    Coverage.DECODE: "decode steps read pages that are another's",
    Coverage.PREFIX: "prompts take over cached blocks, and read back chunks, that are another's",
    Coverage.WRITER: "writes land on pages that are another's, a former owner's too",
    Coverage.TIER: "KV from host memory lands on pages that are another's",
    Coverage.HANDOFF: "prompts leave from, and arrive on, pages that are another's",
}


def _coverage(spec: IntegritySpec) -> dict[str, Any]:
    """Return what a pool's own check compares, and what may pass where it does not."""
    missing = [place for place in Coverage if not spec.checks(place)]
    return {
        "tracker": spec.tracker,
        "covers": [str(place) for place in Coverage if spec.checks(place)],
        "not_covered": {str(place): _UNCOVERED[place] for place in missing},
        "every_steps": spec.every_steps,
        "in_graph": spec.in_graph,
        "overlapped": spec.overlapped,
        "handoff_checksum": spec.handoff_checksum,
    }


def _with_losses(cost: Mapping[str, Any]) -> dict[str, Any]:
    """Add to each step what its pool loses of its throughput when it does nothing else."""
    steps = {}
    for name, step in cost["steps"].items():
        share, seconds = step["share"], step["seconds"]
        ends = [share * end / seconds if seconds else 0.0 for end in step["interval_s"]]
        losses = [one / (1.0 + one) for one in (share, *ends)]
        steps[name] = step | {"throughput_loss": losses[0], "throughput_loss_interval": losses[1:]}
    return {**cost, "steps": steps}


def _serving(case: _Case) -> dict[str, Any]:
    """Return how many requests the pool that decodes serves, and how long its tags last.

    All of the shape's requests decode in one instance, each for its answer's steps; prompts keep
    up. A page's tag is stale while its request lives, or an hour.
    """
    role = token_role(case.pools)
    pool, (prompt, answer) = case.pools[role], _means(case.lengths)
    times = times_of(case.scenario, case.pools)
    scheduling = deployment_of(case.scenario, case.pools, times).pools[str(role)].scheduling
    name = "decode" if role == "decode" else f"{role} decode"
    step_s = case.explained["steps"][name]["seconds"]
    speculation = pool.spec.speculation
    tokens_per_step = 1.0 if speculation is None else speculation.accept_length
    life_s = answer * step_s / tokens_per_step
    requests_per_s = case.shape.requests / life_s
    pages = -(-(prompt + answer) // pool.spec.page_tokens)
    allocations_per_s = requests_per_s * pages / scheduling.ranks
    capacity_pages = scheduling.page_pool().capacity_pages
    wrap = {
        stale: wrap_chance(allocations_per_s, capacity_pages, stale_s)
        for stale, stale_s in (("request", life_s), ("hour", _HOUR_S))
    }
    return {
        "requests_per_s": requests_per_s * pool.spec.instances,
        "tag_wrap": {
            "tag_bits": TAG_BITS,
            "pages": capacity_pages,
            "allocations_per_s": allocations_per_s,
            "seconds_to_wrap": wrap["request"].seconds_to_wrap,
            "stale_s": {"request": life_s, "hour": _HOUR_S},
            "log10_chance": {stale: one.log10_chance for stale, one in wrap.items()},
            "chance": {stale: chance_text(one.log10_chance) for stale, one in wrap.items()},
        },
    }


def _year(
    settings: IntegritySettings,
    rows: Iterable[Mapping[str, Any]],
    serving: Mapping[str, Any],
    scenario: Scenario,
) -> dict[str, Any]:
    """Return a year of the fleet, if all faults were of one family, for each family and check."""
    per_day, origin = _requests_per_day(settings, serving, scenario)
    counted: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        sums = counted.setdefault((row["check"], row["family"]), dict.fromkeys(_SUMS, 0))
        for name in _SUMS:
            sums[name] += row[name]
    fault = FaultRate.assumed(settings.fault_rate)
    families = [family for family in FAMILIES if any(key[1] == family for key in counted)]
    return {
        "requests_per_day": per_day,
        "requests_from": origin,
        "fault_rate_per_request": settings.fault_rate,
        "faults": asdict(fleet_risk(per_day, fault, 0.0).faults),
        "rows": [
            {"check": check, "family": family} | _year_row(per_day, fault, sums)
            for family in families
            for (check, of), sums in counted.items()
            if of == family and _shares(sums)["before_share"] is not None
        ],
    }


def _year_row(per_day: float, fault: FaultRate, sums: Mapping[str, int]) -> dict[str, Any]:
    """Return wrong reads and how often the check fires; at worst with the shares' interval."""
    shares = _shares(sums)
    before, late = shares["before_share"], shares["late_share"]
    fires = sums["caught_before"] + sums["caught_after"]
    likely = fleet_risk(per_day, fault, before)
    worst = fleet_risk(per_day, fault, shares["before_interval"][0])
    return {
        "before_share": before,
        "before_interval": shares["before_interval"],
        "wrong_reads": asdict(likely.wrong_reads_with),
        "wrong_reads_at_worst": asdict(worst.wrong_reads_with),
        "fires": asdict(fleet_risk(per_day, fault, min(1.0, before + late)).aborts_with),
        "aborted_per_fire": sums["aborted"] / fires if fires else 0.0,
        "lost_per_fire": sums["lost"] / fires if fires else 0.0,
    }


def _requests_per_day(
    settings: IntegritySettings, serving: Mapping[str, Any], scenario: Scenario
) -> tuple[float, str]:
    if settings.requests_per_day is not None:
        return settings.requests_per_day, "given"
    traffic = scenario.traffic_spec()
    if traffic.kind in ("poisson", "gamma"):
        return max(traffic.rates_per_s) * _DAY_S, "the scenario's rate, all day"
    return serving["requests_per_s"] * _DAY_S, "what its pools serve with so many at once, all day"
