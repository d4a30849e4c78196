"""The import trigger: loads megatron_rl_patches when the first host framework is imported.

`megatron_rl_patches_startup.pth` calls `main()` at the start of every interpreter of the environment
in which `MEGATRON_RL_PATCHES` is set.  Most of those processes never import Megatron, so nothing is
imported here at module level, and neither wrapt nor the package itself before a host is.
"""

_ROOTS = ("megatron", "slime", "miles", "verl", "nemo_rl")
_OFF = frozenset(("", "0", "false", "off", "no", "none"))
_PATIENCE_SECONDS = 60.0


def main() -> None:
    """Arm the trigger if `MEGATRON_RL_PATCHES` is on; safe to call any number of times, never raises."""
    try:
        import sys

        if _is_on("MEGATRON_RL_PATCHES") and not any(isinstance(f, _Trigger) for f in sys.meta_path):
            sys.meta_path.insert(0, _Trigger(_roots()))
    except Exception as error:
        _complain(error)


class _Trigger:
    """A finder that finds nothing by itself: the first look-up of a host activates the patches."""

    def __init__(self, roots: frozenset[str]) -> None:
        from _thread import RLock

        self._roots = roots
        self._lock = RLock()
        self._activating = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname.partition(".")[0] not in self._roots:
            return None
        # A second thread waits here until the hooks are in place.  Not for ever: it may hold the import
        # lock of a module that the activation needs; hooks that come late still fire.
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return None
        try:
            if self._activating:  # the activation itself imports a host
                return None
            if self._roots:
                self._activating = True
                try:
                    _activate()
                finally:
                    self._activating = False
                # Disarmed, but left on sys.meta_path: removing it would shift that list under the feet
                # of every thread that is walking it, and make them skip a finder.
                self._roots = frozenset()
        finally:
            self._lock.release()
        # The import system has passed the place where wrapt just put its finder; ask all of them again,
        # so that a hook on this very module fires too.
        from importlib.util import find_spec

        return find_spec(fullname)


def _activate() -> None:
    try:
        from megatron_rl_patches.activation import activate_from_environment

        activate_from_environment()
    except Exception as error:
        if not _is_on("MEGATRON_RL_PATCHES_STRICT"):
            _complain(error)
        elif isinstance(error, ImportError):  # which hosts swallow where they make each other optional
            raise RuntimeError(f"megatron_rl_patches could not be activated: {error}") from error
        else:
            raise


def _is_on(variable: str) -> bool:
    import os

    return os.environ.get(variable, "").strip().lower() not in _OFF


def _roots() -> frozenset[str]:
    import os

    targets = os.environ.get("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", "").split(",")
    extra = (target.partition(":")[0].partition(".")[0].strip() for target in targets)
    return frozenset(_ROOTS).union(filter(None, extra))


def _complain(error: Exception) -> None:
    import sys

    reason = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        sys.stderr.write(
            f"megatron_rl_patches: not activated, going on without: {reason} "
            "(MEGATRON_RL_PATCHES_STRICT=1 makes this an error)\n"
        )
    except Exception:
        pass  # no stderr, or a closed one: nobody to tell
