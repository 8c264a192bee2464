"""The `profile` verbs of the command line: import, show, diff and list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

profile_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Kernel timings that predictions rest on: import, look at, compare.",
)

_JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the report as JSON; '-' prints only it."),
]
_Named = typer.Argument(metavar="PROFILE", help="A profile's name or folder.")


@profile_app.command("import")
def import_profile(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="A shipped GPU, such as h200-sxm.")],
    engine: Annotated[str, typer.Option(help="Whose kernels: sglang, vllm or trtllm.")] = "sglang",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where; default: where `profile: auto` looks first."
        ),
    ] = None,
    json_file: _JsonFile = None,
) -> None:
    """Make a profile from the kernel timings of the installed aiconfigurator-core.

    Reads its kernel tables, fits and thins them, and holds whole shapes out to say how far off the
    result is. Needs: pip install 'tonnage[import]'. Takes minutes.

    \b
    Examples:
      tonnage profile import a100-80g --engine vllm
      tonnage profile import h200-sxm --out ./h200.profile
    """
    from tonnage import api
    from tonnage.output import check_destinations, write_json
    from tonnage.profile_tables import header_report, print_header
    from tonnage.scenarios.profiles import state_folder
    from tonnage.sim.cost.profile import SUFFIX, check_place, write_profile
    from tonnage.terminal import output_console, progress

    check_destinations(json_file, None)
    place = out or state_folder() / f"{gpu}-{engine}{SUFFIX}"
    check_place(place)
    with progress(quiet=json_file == "-") as report_progress:
        profile = api.import_profile(gpu, engine, progress=report_progress)
    write_profile(profile, place)
    report = header_report(profile, place)
    if write_json(json_file, report):
        print_header(output_console(), report)


@profile_app.command("show")
def show(
    profile: Annotated[str, _Named],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write NAME.html there: fit against data, in one file."
        ),
    ] = None,
    json_file: _JsonFile = None,
) -> None:
    """Show what a profile holds, where it is from, and how far off it is.

    \b
    Examples:
      tonnage profile show h200-sxm-sglang
      tonnage profile show h200-sxm-sglang --out report
      tonnage profile show ./mine.profile --json -
    """
    from tonnage.output import check_destinations, make_folder, write_json, write_text
    from tonnage.profile_tables import header_report, print_header
    from tonnage.scenarios.profiles import find_profile
    from tonnage.sim.cost.profile import load_profile
    from tonnage.terminal import output_console

    check_destinations(json_file, out)
    place = find_profile(profile)
    loaded = load_profile(place)
    report = header_report(loaded, place)
    if out is not None:
        from tonnage.profile_report import profile_page

        make_folder(out)
        file = out / f"{loaded.header.name}.html"
        write_text(file, profile_page(loaded))
        report["page"] = str(file)
    if write_json(json_file, report):
        print_header(output_console(), report)


@profile_app.command("diff")
def diff(
    first: Annotated[str, _Named],
    second: Annotated[str, _Named],
    json_file: _JsonFile = None,
) -> None:
    """Compare two profiles: their headers, and the times that they predict at common points.

    A ratio is the second's time over the first's.

    \b
    Examples:
      tonnage profile diff h200-sxm-sglang h200-sxm-vllm
      tonnage profile diff h200-sxm-sglang ./mine.profile --json -
    """
    from tonnage.output import check_destinations, write_json
    from tonnage.profile_diff import diff_report
    from tonnage.profile_tables import print_diff
    from tonnage.scenarios.profiles import find_profile
    from tonnage.sim.cost.profile import load_profile
    from tonnage.terminal import output_console

    check_destinations(json_file, None)
    loaded = [load_profile(find_profile(name)) for name in (first, second)]
    report = diff_report(*loaded)
    if write_json(json_file, report):
        print_diff(output_console(), report)


@profile_app.command("list")
def list_profiles(json_file: _JsonFile = None) -> None:
    """List the profiles that have a name: the shipped ones and this user's.

    \b
    Examples:
      tonnage profile list
      tonnage profile list --json -
    """
    from tonnage import listing
    from tonnage.output import check_destinations, write_json

    check_destinations(json_file, None)
    rows = listing.profiles()
    if write_json(json_file, {"profiles": rows}):
        from tonnage.terminal import output_console

        listing.print_rows(output_console(), rows)
