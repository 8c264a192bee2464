"""Which profile `profile:` means, in which order `auto` looks, and that it says what it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.scenarios import profiles
from tonnage.scenarios.catalogue import gpu_names, load_gpu
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.profiles import ProfileChoice, choose_profile, find_profile, profile_paths
from tonnage.sim.cost.profile import HEADER_FILE, Profile, ProfileHeader, write_profile
from tonnage.sim.domain import BadInputError

SHIPPED = Path(profiles.__file__).parent / "profiles"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user's folder of profiles, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path / "state" / "tonnage" / "profiles"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of shipped profiles in place of the package's, empty."""
    place = tmp_path / "shipped"
    monkeypatch.setattr(profiles, "_SHIPPED", place)
    return place


def put(place: Path, gpu: str = "h200-sxm", engine: str = "sglang", **changed: Any) -> Path:
    """Write an empty profile; its folder is named as the shipped ones are."""
    name = changed.pop("name", f"{gpu}-{engine}")
    fields = {
        "engine_version": "1",
        "source": "imported",
        "source_text": "a test",
        "date": "2026-11-30",
        "tonnage_version": "0.1.0",
    }
    header = ProfileHeader(name=name, gpu=gpu, engine=engine, **{**fields, **changed})
    write_profile(Profile(header, {}), place / f"{name}.profile")
    return place / f"{name}.profile"


def chosen(wanted: str = "auto", gpu: str = "h200-sxm", engine: str = "sglang") -> ProfileChoice:
    return choose_profile(wanted, load_gpu(gpu), engine, Path())


# --- the order of auto --------------------------------------------------------------------------


def test_without_any_profile_auto_is_the_datasheet_and_says_so(shipped: Path) -> None:
    choice = chosen()
    assert (choice.path, choice.source) == (None, "datasheet")
    assert choice.why == "the datasheet: no profile for h200-sxm and sglang, nor for its family"
    assert choice.load() is None


def test_auto_prefers_measured_here_then_imported_here_then_shipped(
    shipped: Path, own: Path
) -> None:
    expected = put(shipped)
    assert chosen().path == expected
    assert chosen().why == "the shipped profile for h200-sxm and sglang"
    put(own, engine="vllm")  # another engine's kernels do not replace the shipped ones
    assert chosen().path == expected
    expected = put(own, name="mine")
    assert chosen().path == expected
    assert chosen().why == f"the profile imported on this machine on 2026-11-30 ({expected})"
    expected = put(own, engine="tonnage", source="measured", date="2025-01-01", name="older")
    assert chosen().path == expected
    expected = put(own, engine="tonnage", source="measured", date="2026-01-01")
    assert chosen().path == expected
    assert chosen().source == "measured"
    assert "measured on this machine on 2026-01-01" in chosen().why
    assert "its kernels are those of tonnage" in chosen().why


def test_a_profile_of_another_gpu_measured_here_is_not_taken(shipped: Path, own: Path) -> None:
    put(own, gpu="l40s", engine="tonnage", source="measured")
    assert chosen().source == "datasheet"


def test_the_same_gpu_under_another_engine_comes_before_another_gpu(shipped: Path) -> None:
    put(shipped, gpu="h100-sxm")
    same = put(shipped, engine="vllm")
    choice = chosen()
    assert (choice.path, choice.source, choice.scaled_from) == (same, "imported", None)
    assert "its kernels are those of vllm" in choice.why


@pytest.mark.parametrize(
    ("gpu", "nearest"),
    [("h20", "h100-sxm"), ("h20-141g", "h200-sxm"), ("gb300", "b300-sxm"), ("b200-sxm", "gb200")],
)
def test_a_gpu_without_data_takes_the_nearest_of_its_family_scaled(
    shipped: Path, gpu: str, nearest: str
) -> None:
    for other in ("h100-sxm", "h200-sxm", "b300-sxm", "gb200"):
        put(shipped, gpu=other)
    choice = chosen(gpu=gpu)
    assert choice.path == shipped / f"{nearest}-sglang.profile"
    assert (choice.source, choice.scaled_from) == ("scaled", nearest)
    assert f"timed on {nearest}, scaled by the datasheets to {gpu}" in choice.why


@pytest.mark.parametrize("gpu", ["a100-80g", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000"])
def test_a_gpu_of_another_family_is_not_scaled_to(shipped: Path, gpu: str) -> None:
    for other in ("h100-sxm", "h200-sxm", "b300-sxm", "gb200"):
        put(shipped, gpu=other)
    assert chosen(gpu=gpu).source == "datasheet"


def test_trtllm_and_the_shipped_profile_of_the_engine_fill_gaps(shipped: Path, own: Path) -> None:
    base, filler = put(shipped), put(shipped, engine="trtllm")
    assert chosen().back_fill == (filler,)
    put(own)
    assert chosen().back_fill == (base, filler)
    assert chosen("h200-sxm-trtllm").back_fill == ()


# --- names and paths ----------------------------------------------------------------------------


def test_datasheet_is_the_datasheet_whatever_there_is(shipped: Path) -> None:
    put(shipped)
    assert chosen("datasheet") == ProfileChoice(None, "datasheet", "the datasheet, as asked")


def test_a_profile_can_be_named_and_scaled_on_purpose(shipped: Path) -> None:
    path = put(shipped, engine="vllm")
    choice = chosen("h200-sxm-vllm", gpu="a100-80g")
    assert (choice.path, choice.scaled_from) == (path, "h200-sxm")
    assert choice.why.startswith("the profile h200-sxm-vllm, as asked; its kernels are those of")


def test_the_users_profile_hides_a_shipped_one_of_the_same_name(shipped: Path, own: Path) -> None:
    put(shipped)
    mine = put(own)
    assert profile_paths() == {"h200-sxm-sglang": mine}
    assert find_profile("h200-sxm-sglang") == mine


def test_a_path_starts_from_the_scenario(shipped: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "there", name="mine")
    scenario = parse_scenario({"profile": "there/mine.profile"}, folder=tmp_path)
    assert scenario.profile_choice("serve").path == path
    assert parse_scenario(scenario.resolved(), folder=tmp_path).profile == "there/mine.profile"
    absolute = parse_scenario({"profile": str(path)})
    assert absolute.profile_choice("serve").path == path


def test_a_path_without_a_profile_names_file_and_field(shipped: Path) -> None:
    scenario = parse_scenario({"profile": "./none"}, "mine.yaml")
    with pytest.raises(BadInputError) as caught:
        scenario.profile_choice("serve")
    assert str(caught.value) == "mine.yaml: profile: ./none: no profile there; check the path"


def test_an_unknown_name_is_answered_with_the_nearest(shipped: Path) -> None:
    put(shipped)
    with pytest.raises(BadInputError) as caught:
        parse_scenario({"profile": "h200-sglang"}, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: profile: 'h200-sglang' is no profile; ")
    assert "did you mean 'h200-sxm-sglang'?" in str(caught.value)
    with pytest.raises(BadInputError, match="there is no profile named 'h20'"):
        find_profile("h20")


def test_a_damaged_profile_of_the_user_is_not_skipped(shipped: Path, own: Path) -> None:
    put(shipped)
    (put(own) / HEADER_FILE).write_text("{")
    with pytest.raises(BadInputError, match=r"header\.json: not JSON, perhaps cut off"):
        chosen()


# --- where the user's profiles lie --------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_STATE_HOME": "/var/x"}, "/var/x/tonnage/profiles"),
        ("linux", {"XDG_STATE_HOME": ""}, "/home/u/.local/state/tonnage/profiles"),
        ("linux", {"XDG_STATE_HOME": "relative"}, "/home/u/.local/state/tonnage/profiles"),
        ("darwin", {}, "/home/u/Library/Application Support/tonnage/profiles"),
        ("win32", {"LOCALAPPDATA": "/c/local"}, "/c/local/tonnage/profiles"),
    ],
)
def test_the_users_folder(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/u"))
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert profiles.state_folder() == Path(expected)


# --- what ships ---------------------------------------------------------------------------------


PARTS = {"rtx-pro-6000-vllm-0.19"}  # collectives of another machine, asked for by name
WHOLE = [path for path in sorted(SHIPPED.glob("*.profile")) if path.stem not in PARTS]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_shipped_profile_is_whole_attributed_and_small(path: Path) -> None:
    choice = choose_profile(
        "auto", load_gpu(path.name.rpartition("-")[0]), path.stem.rpartition("-")[2], Path()
    )
    assert choice.path == path
    profile = choice.load()
    assert profile is not None
    header = profile.header
    assert path.name == f"{header.name}.profile" == f"{header.gpu}-{header.engine}.profile"
    assert header.gpu in gpu_names()
    assert (header.source, header.licence) == ("imported", "Apache-2.0")
    assert "aiconfigurator-core 0.12.0" in header.source_text
    assert profile.tables
    assert sum(file.stat().st_size for file in path.iterdir()) <= 2.2e6


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_is_filled_in_and_never_chosen_by_itself(name: str) -> None:
    gpu = load_gpu("rtx-pro-6000")
    choice = choose_profile(name, gpu, "vllm", Path())
    profile = choice.load()
    assert profile is not None
    assert set(profile.tables) == {"all_reduce", "all_gather", "all_to_all"}
    assert [path.stem for path in choice.back_fill] == ["rtx-pro-6000-vllm"]
    for other in ("rtx-pro-6000", "rtx-5090"):
        chosen = choose_profile("auto", load_gpu(other), "vllm", Path()).path
        assert chosen is not None
        assert chosen.stem == "rtx-pro-6000-vllm"
