"""In the shape of Megatron-LM's: one set of arguments and timers per process."""

from types import SimpleNamespace

from megatron.core.timers import Timers

_args: SimpleNamespace | None = None
_timers: Timers | None = None


def set_global_variables(args: SimpleNamespace) -> None:
    global _args, _timers
    _args = args
    _timers = Timers(log_level=args.timing_log_level, log_option="minmax")


def get_args() -> SimpleNamespace:
    assert _args is not None, "args is not initialized."
    return _args


def get_timers() -> Timers:
    assert _timers is not None, "timers is not initialized."
    return _timers
