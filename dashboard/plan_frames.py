"""The tables and one chart of a plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from tonnage.dashboard.charts import COLOURS, blank

if TYPE_CHECKING:
    from tonnage.planner import PlanReport
    from tonnage.sim.planning.fleet_plan import FleetPlan


def pools_frame(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per pool: what to start."""
    return pd.DataFrame(
        [
            {
                "pool": pool.role,
                "instances": pool.instances,
                "GPU": pool.gpu,
                "GPUs": pool.gpus,
                **asdict(pool.layout),
                "weights": pool.weights,
                "KV": pool.kv,
                "chunk tokens": pool.chunk_tokens,
                "KV tokens": pool.kv_tokens,
                "USD per GPU and hour": pool.gpu_hour_usd,
            }
            for pool in plan.pools
        ]
    )


def front_frame(report: PlanReport) -> pd.DataFrame:
    """Return the fleets of the front."""
    return pd.DataFrame([asdict(one) for one in report.front])


def margins_frame(report: PlanReport) -> pd.DataFrame:
    """Return what the cheapest fleet with another format in one pool costs, where there is one."""
    return pd.DataFrame(
        [
            {
                "change": f"{one.role} {one.what}: {one.alternative} for {one.chosen}",
                "USD per hour more": one.usd_per_hour,
                "USD per M output tokens more": None if more is None else more.value,
                "fleet": one.fleet,
                "tie": one.tie,
            }
            for one in report.margins
            for more in [one.usd_per_million_output_tokens]
        ],
        columns=[
            "change",
            "USD per hour more",
            "USD per M output tokens more",
            "fleet",
            "tie",
        ],
    )


def margins_figure(margins: pd.DataFrame) -> go.Figure:
    """Draw, widest first, how the cost moves with each choice: a tornado around the best."""
    known = margins.dropna(subset=["USD per hour more"])
    known = known.sort_values("USD per hour more", key=abs)
    changes = known["USD per hour more"]
    figure = blank("USD per hour more than the best", "")
    figure.add_bar(
        x=changes,
        y=known["change"],
        orientation="h",
        marker_color=[COLOURS[3] if one > 0 else COLOURS[0] for one in changes],
        text=[f"{one:+,.2f}" for one in changes],
        customdata=known["fleet"],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_yaxes(automargin=True)
    figure.update_layout(height=150 + 40 * len(known), showlegend=False)
    return figure
