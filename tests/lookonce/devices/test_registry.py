"""The device that each value of `--device` selects, and plug-ins: chosen, broken, refused, and left out."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from structlog.testing import capture_logs

from lookonce.devices import cpu, cuda
from lookonce.devices.base import Availability, DevicePlatform
from lookonce.devices.registry import DeviceRegistry, check_device, chosen_platform, imported_part, installed_devices
from lookonce.errors import ConfigurationError
from tests.conftest import REPOSITORY
from tests.device_plugins import plant_plugin

# A module of a plug-in; the braces are for the name and for further fields.
MODULE = """
import torch
from lookonce.devices.base import Availability, DevicePlatform
PLATFORM = DevicePlatform(
    name={!r},
    runner="decoder_svc.runner.cpu.runner:CPUModelRunner",
    availability=lambda: Availability({}),
    torch_device=lambda: torch.device("meta"),
    {}
)
"""


def module(name: str, availability: str = "True, 'a card'", fields: str = "") -> str:
    """The source of a plug-in's module."""
    return MODULE.format(name, availability, fields)


@pytest.fixture
def plant(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`plant_plugin` for a folder on this process' module path, whose modules are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def planted(distribution: str, devices: dict[str, str], **modules: str) -> None:
        plant_plugin(tmp_path, distribution, devices, **modules)
        for name in modules:
            # Recorded for the end of the test.
            monkeypatch.setitem(sys.modules, name, sys)
            monkeypatch.delitem(sys.modules, name)

    return planted


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")


def refusal(setting: str) -> str:
    """The message with which a value of `--device` is refused."""
    with pytest.raises(ConfigurationError) as caught:
        chosen_platform(setting)
    return caught.value.message


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.parametrize(("number", "detail"), [(1, "card 1"), (4, "card 1, the first of 4")])
def test_doctor_is_told_how_many_gpus_there_are(number: int, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    assert cuda.PLATFORM.availability().detail == detail


@pytest.mark.usefixtures("without_cuda")
def test_without_a_cuda_device_auto_is_the_cpu_and_cuda_is_refused_with_the_reason() -> None:
    assert chosen_platform("auto") is chosen_platform("cpu") is cpu.PLATFORM
    assert cpu.PLATFORM.torch_device() == torch.device("cpu")
    assert refusal("cuda") == "--device: cuda cannot be used: PyTorch sees no CUDA device here; use one of auto, cpu"


@pytest.mark.usefixtures("with_cuda")
def test_a_cuda_device_is_taken_unless_the_cpu_is_asked_for() -> None:
    assert chosen_platform("auto") is chosen_platform("cuda") is cuda.PLATFORM
    assert cuda.PLATFORM.torch_device() == torch.device("cuda", 1)
    assert chosen_platform("cpu") is cpu.PLATFORM


@pytest.mark.usefixtures("without_cuda")
def test_the_choice_is_logged_with_what_was_found_and_what_was_missing() -> None:
    with capture_logs() as logs:
        chosen_platform("auto")
    (line,) = logs
    assert (line["event"], line["name"]) == ("device", "cpu")
    assert "vector instructions" in line["found"]
    assert line["missing"] == {"cuda": "PyTorch sees no CUDA device here"}


@pytest.mark.parametrize("ask", [chosen_platform, check_device])
def test_an_unknown_name_is_refused_with_all_registered_ones(
    ask: Callable[[str], object], plant: Callable[..., None]
) -> None:
    plant("tensor-card", {"card": "card_module:PLATFORM"})
    with pytest.raises(ConfigurationError) as caught:
        ask("npu")
    assert caught.value.message == "--device: no device npu is registered; use one of auto, cpu, cuda, card"


def test_a_plug_in_is_chosen_by_its_name(plant: Callable[..., None]) -> None:
    plant("tensor-card", {"card": "card_module:PLATFORM"}, card_module=module("card", fields="block_size=32"))
    check_device("card")
    chosen = chosen_platform("card")
    assert (chosen.name, chosen.block_size, chosen.torch_device()) == ("card", 32, torch.device("meta"))
    assert chosen_platform("auto").name != "card", "it has no rank"


@pytest.mark.usefixtures("with_cuda")
def test_auto_takes_the_highest_rank_that_is_available(plant: Callable[..., None]) -> None:
    plant("low", {"low": "low_module:PLATFORM"}, low_module=module("low", fields="auto_rank=1"))
    plant("equal", {"equal": "equal_module:PLATFORM"}, equal_module=module("equal", fields="auto_rank=10"))
    plant(
        "best",
        {"best": "best_module:PLATFORM"},
        best_module=module("best", "False, 'no card in any slot'", "auto_rank=20"),
    )
    with capture_logs() as logs:
        assert chosen_platform("auto") is cuda.PLATFORM, "our own before an equal one"
    assert logs[-1]["missing"] == {"best": "no card in any slot"}
    assert refusal("best") == (
        "--device: best cannot be used: no card in any slot; use one of auto, cpu, cuda, equal, low"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_driver_that_nobody_has", "cannot be imported (ModuleNotFoundError: No module named"),
        ("raise RuntimeError('no driver:\\n  load it')", "cannot be imported (RuntimeError: no driver: load it)"),
        (module("card", fields="block_size=0"), "cannot be imported (ValueError: block_size is 0"),
        ("", "has no attribute 'PLATFORM'"),
        ("PLATFORM = 1", "card_module:PLATFORM of tensor-card is int, not a DevicePlatform"),
        (module("other"), "tensor-card registers the device other as card; make the names equal"),
    ],
    ids=["missing driver", "failing driver", "impossible value", "no object", "no platform", "other name"],
)
def test_a_broken_plug_in_stops_a_service_only_if_it_is_chosen(
    plant: Callable[..., None], source: str, reason: str
) -> None:
    plant("tensor-card", {"card": "card_module:PLATFORM"}, card_module=source)
    message = refusal("card")
    assert message.startswith("--device: ")
    assert reason in message
    assert "tensor-card" in message
    assert "\n" not in message
    with pytest.raises(ConfigurationError, match="tensor-card"):
        check_device("card")
    assert chosen_platform("cpu") is cpu.PLATFORM
    with capture_logs() as logs:
        assert chosen_platform("auto") in (cpu.PLATFORM, cuda.PLATFORM)
    assert [line["reason"] for line in logs if line["event"] == "device plug-in left out"] == [
        message.removeprefix("--device: ")
    ]


def test_a_device_whose_check_fails_is_not_available(plant: Callable[..., None]) -> None:
    source = module("card", "*[][0]", "auto_rank=20")
    plant("tensor-card", {"card": "card_module:PLATFORM"}, card_module=source)
    assert "its availability check failed (IndexError: list index out of range)" in refusal("card")
    assert chosen_platform("auto").name != "card"


@pytest.mark.parametrize("name", ["cpu", "cuda", "auto"])
@pytest.mark.usefixtures("without_cuda")
def test_a_plug_in_with_a_taken_name_is_refused(plant: Callable[..., None], name: str) -> None:
    plant("impostor", {name: "impostor_module:PLATFORM"}, impostor_module=f"raise SystemExit({name!r})")
    with capture_logs() as logs:
        assert chosen_platform("cpu") is chosen_platform("auto") is cpu.PLATFORM
    reason = f"the device name {name} of the plug-in impostor is taken; uninstall the plug-in"
    assert {line["reason"] for line in logs if line["event"] == "device plug-in refused"} == {reason}
    assert installed_devices().names == ("cpu", "cuda")


def test_two_plug_ins_with_one_name_are_both_refused(plant: Callable[..., None]) -> None:
    for distribution in ("second", "first"):
        plant(distribution, {"card": f"{distribution}:PLATFORM"}, **{distribution: "raise SystemExit"})
    reason = "the device name card is claimed by first and second; uninstall all but one"
    assert refusal("card") == f"--device: {reason}"
    with capture_logs() as logs:
        assert chosen_platform("cpu") is cpu.PLATFORM
    assert logs[0]["reason"] == reason


def test_a_name_is_registered_once() -> None:
    registry = DeviceRegistry()
    registry.register(cpu.PLATFORM)
    with pytest.raises(ConfigurationError, match="the device name cpu is taken"):
        registry.register(cpu.PLATFORM)


def test_states_tell_missing_devices_from_broken_plug_ins(plant: Callable[..., None]) -> None:
    plant("absent", {"absent": "absent_module:PLATFORM"}, absent_module=module("absent", "False, 'no card'"))
    plant("broken", {"broken": "broken_module:PLATFORM"}, broken_module="import a_driver_that_nobody_has")
    states = {state.name: state for state in installed_devices().states()}
    assert list(states) == ["cpu", "cuda", "absent", "broken"]
    assert states["cpu"].availability.is_available
    assert (states["absent"].availability, states["absent"].is_broken) == (Availability(False, "no card"), False)
    assert states["broken"].is_broken


def test_a_part_that_cannot_be_imported_is_refused_with_the_devices_name() -> None:
    assert imported_part(cpu.PLATFORM, "lookonce.devices.base:DevicePlatform") is DevicePlatform
    for reference in ("lookonce.no_such_module:A", "lookonce.devices.base:NoSuchName"):
        with pytest.raises(ConfigurationError, match=f"--device: {reference} of the device cpu cannot be imported"):
            imported_part(cpu.PLATFORM, reference)


def test_names_are_checked_without_torch() -> None:
    """A process that must not start says so before it spends seconds on importing libraries."""
    program = (
        "import sys; from lookonce.devices.registry import check_device; check_device('cuda'); check_device('auto'); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.strip() == "False"
