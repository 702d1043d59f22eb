"""The registry of devices by name: two of our own, and those of plug-ins.

A plug-in is an installed distribution with an entry point in the group `lookonce.devices`. The entry point's name is
the device's, and its object is a DevicePlatform. Listing names imports no plug-in. A plug-in with a fault stops a
service only if its device is chosen; otherwise the log and `lookonce doctor` name the fault.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lookonce.devices import cpu, cuda
from lookonce.devices.base import Availability, DevicePlatform
from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger

GROUP = "lookonce.devices"
# The value of `--device` that takes the best available device.
AUTO = "auto"

_BUILT_IN: tuple[DevicePlatform, ...] = (cpu.PLATFORM, cuda.PLATFORM)

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One line of the list of devices, for people."""

    name: str
    availability: Availability
    # Whether the device is missing because its plug-in has a fault.
    is_broken: bool = False


class PluginError(Exception):
    """A name that leads to no usable platform; the message gives the reason and the remedy."""


class DeviceRegistry:
    """Platforms by name. Each name has one owner."""

    def __init__(self) -> None:
        # Plug-ins are entry points until they are imported.
        self._sources: dict[str, DevicePlatform | EntryPoint] = {}
        # Names that several plug-ins claim, with the reason why none of them gets it.
        self._disputed: dict[str, str] = {}
        # Reasons why plug-ins were not registered.
        self.refusals: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in the order of their registration. Plug-ins among them may turn out to be broken."""
        return tuple(self._sources)

    def register(self, platform: DevicePlatform) -> None:
        """Adds a platform. Raises ConfigurationError if its name is taken."""
        if platform.name in (AUTO, *self._sources):
            raise ConfigurationError(f"the device name {platform.name} is taken")
        self._sources[platform.name] = platform

    def add_plugins(self, plugins: Iterable[EntryPoint]) -> None:
        """Adds the names of plug-ins without importing them.

        A plug-in whose name has an owner is refused. If two plug-ins claim one new name, both are refused: the order of
        the module path must not decide which code runs.
        """
        claims: dict[str, list[EntryPoint]] = {}
        for entry_point in plugins:
            claims.setdefault(entry_point.name, []).append(entry_point)
        for name, claimants in sorted(claims.items()):
            sources = " and ".join(sorted(map(_source, claimants)))
            if name in (AUTO, *self._sources):
                self.refusals.append(f"the device name {name} of the plug-in {sources} is taken; uninstall the plug-in")
            elif len(claimants) > 1:
                self._disputed[name] = f"the device name {name} is claimed by {sources}; uninstall all but one"
                self.refusals.append(self._disputed[name])
            else:
                self._sources[name] = claimants[0]

    def platform(self, name: str) -> DevicePlatform:
        """Returns a platform; imports the plug-in that has it.

        Raises ConfigurationError for a name that nobody or more than one plug-in has, and for a plug-in that cannot be
        used.
        """
        try:
            return self._platform(name)
        except PluginError as error:
            raise ConfigurationError(f"--device: {error}") from error.__cause__

    def choose(self, setting: str) -> DevicePlatform:
        """Returns the platform for a value of `--device`, which this process can use. Needs torch.

        `auto` takes the available device with the highest `auto_rank` and leaves out plug-ins that cannot be used.
        Raises ConfigurationError for a device that cannot be used. Logs the choice and every plug-in with a fault.
        """
        for refusal in self.refusals:
            _log.warning("device plug-in refused", reason=refusal)
        if setting == AUTO:
            return self._best()
        platform = self.platform(setting)
        found = _availability(platform)
        if not found.is_available:
            others = ", ".join(name for name in (AUTO, *self.names) if name != setting)
            raise ConfigurationError(f"--device: {setting} cannot be used: {found.detail}; use one of {others}")
        _log.info("device", name=platform.name, found=found.detail)
        return platform

    def states(self) -> list[DeviceState]:
        """Returns every registered device with its availability. Imports all plug-ins, and torch."""
        states = []
        for name in self.names:
            try:
                states.append(DeviceState(name, _availability(self._platform(name))))
            except PluginError as error:
                states.append(DeviceState(name, Availability(False, str(error)), is_broken=True))
        return states

    def _best(self) -> DevicePlatform:
        ranked: list[tuple[int, DevicePlatform]] = []
        for name in self.names:
            try:
                platform = self._platform(name)
            except PluginError as error:
                _log.warning("device plug-in left out", reason=str(error))
                continue
            if platform.auto_rank is not None:
                ranked.append((platform.auto_rank, platform))
        missing: dict[str, str] = {}
        # Among equal ranks, the sort keeps the order of registration.
        for _, platform in sorted(ranked, key=lambda pair: -pair[0]):
            found = _availability(platform)
            if found.is_available:
                _log.info("device", name=platform.name, found=found.detail, missing=missing)
                return platform
            missing[platform.name] = found.detail
        raise ConfigurationError(f"--device: auto finds no device: {missing}")

    def _platform(self, name: str) -> DevicePlatform:
        if name in self._disputed:
            raise PluginError(self._disputed[name])
        if name not in self._sources:
            raise PluginError(f"no device {name} is registered; use one of {', '.join((AUTO, *self.names))}")
        source = self._sources[name]
        if isinstance(source, EntryPoint):
            source = self._sources[name] = _loaded(source)
        return source


def installed_devices() -> DeviceRegistry:
    """Returns a registry with our own devices and with all plug-ins that are installed now."""
    registry = DeviceRegistry()
    for platform in _BUILT_IN:
        registry.register(platform)
    registry.add_plugins(entry_points(group=GROUP))
    return registry


def check_device(setting: str) -> None:
    """Raises ConfigurationError for a value of `--device` that no installed device has. Needs no torch of its own."""
    if setting != AUTO:
        installed_devices().platform(setting)


def chosen_platform(setting: str) -> DevicePlatform:
    """Returns the platform for a value of `--device` among all installed devices; raises what `choose` raises."""
    return installed_devices().choose(setting)


def imported_part(platform: DevicePlatform, reference: str) -> Any:
    """Imports and returns the "module:name" that a platform names. Raises ConfigurationError."""
    try:
        return pkgutil.resolve_name(reference)
    except Exception as error:  # the plug-in's own code, which may raise anything
        raise ConfigurationError(
            f"--device: {reference} of the device {platform.name} cannot be imported ({_reason(error)})"
        ) from error


def _loaded(entry_point: EntryPoint) -> DevicePlatform:
    """Imports a plug-in. Raises PluginError."""
    source = _source(entry_point)
    try:
        platform = entry_point.load()
    except Exception as error:  # the plug-in's own code, which may raise anything
        raise PluginError(
            f"the plug-in {source} of the device {entry_point.name} cannot be imported ({_reason(error)}); repair or "
            "uninstall it"
        ) from error
    if not isinstance(platform, DevicePlatform):
        raise PluginError(f"{entry_point.value} of {source} is {type(platform).__name__}, not a DevicePlatform")
    if platform.name != entry_point.name:
        raise PluginError(f"{source} registers the device {platform.name} as {entry_point.name}; make the names equal")
    return platform


def _availability(platform: DevicePlatform) -> Availability:
    """Asks a platform; a check that fails means that the device is not available."""
    try:
        return platform.availability()
    except Exception as error:  # the plug-in's own code and its driver, which may raise anything
        return Availability(False, f"its availability check failed ({_reason(error)})")


def _reason(error: Exception) -> str:
    """Returns an exception's type and text on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _source(entry_point: EntryPoint) -> str:
    """Returns the name of the distribution that has an entry point."""
    return entry_point.value if entry_point.dist is None else entry_point.dist.name
