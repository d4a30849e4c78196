"""The import trigger: loads megatron_rl_patches when the first framework is imported.

`megatron_rl_patches_startup.pth` calls `main()` at the start of every interpreter of the environment
in which `MEGATRON_RL_PATCHES` is set.  Most of those processes never import Megatron, so nothing is
imported here at module level, and neither wrapt nor the package itself before a framework is.
"""

_ROOTS = ("megatron", "slime", "vime", "miles", "verl", "nemo_rl", "areal")
_ON = ("1", "true", "on", "yes")
_OFF = ("", "0", "false", "off", "no", "none")
_PATIENCE_SECONDS = 60.0


def main() -> None:
    """Arm the trigger if `MEGATRON_RL_PATCHES` is on; safe to call any number of times, never raises."""
    try:
        import sys

        if _value("MEGATRON_RL_PATCHES") in _OFF or any(isinstance(f, _Trigger) for f in sys.meta_path):
            return
        sys.meta_path.insert(0, _Trigger(_roots()))
    except Exception as error:
        _complain(error)


class _Trigger:
    """A finder that finds what the others find, and has the first framework loaded by `_Loader`."""

    def __init__(self, roots: frozenset[str]) -> None:
        from _thread import RLock

        self._roots = roots
        self._lock = RLock()
        self._activating = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self._roots or target is not None:
            return None
        spec = self.ask_others(fullname, path)
        # Without a loader it is a namespace, as `megatron` is: the first package in it will do.
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = _Loader(spec.loader, path, self)
        return spec

    def ask_others(self, fullname, path):
        import sys

        for finder in tuple(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(fullname, path, None)
            if spec is not None:
                return spec
        return None

    def fire(self) -> None:
        """Activate once.  Raises, and stays armed, only if that fails and strict mode is on."""
        # A second thread waits until the hooks are in place.  Not for ever: it may hold the import lock
        # of a module that the activation needs; hooks that come late still fire.
        if not self._roots or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            if self._roots and not self._activating:  # the activation itself may import a framework
                self._activating = True
                try:
                    activate()
                finally:
                    self._activating = False
                # Disarmed, but left on sys.meta_path: removing it would shift that list under the feet
                # of every thread that is walking it, and make them skip a finder.
                self._roots = frozenset()
        finally:
            self._lock.release()


class _Loader:
    """Fires the trigger, then hands over to the real loader.

    Not done in `find_spec`, which runs under the global import lock: if another thread were half way
    through a module that the activation imports, the two would wait for each other.  It also leaves those
    alone who only look whether a framework is installed.
    """

    def __init__(self, loader, path, trigger):
        self._loader, self._path, self._trigger = loader, path, trigger
        self._module = None

    def create_module(self, spec):
        from sys import modules

        is_reload = spec.name in modules
        self._trigger.fire()
        # wrapt's finder is on sys.meta_path only now; with its loader a hook on this very module fires, too.
        spec_now = self._trigger.ask_others(spec.name, self._path)
        self._loader = getattr(spec_now, "loader", None) or self._loader
        if spec.loader is self:
            spec.loader = self._loader
        # The activation imported this very module: a second copy would be one that nobody patches.
        self._module = None if is_reload else modules.get(spec.name)
        return self._module or self._loader.create_module(spec)

    def exec_module(self, module):
        if self._module is None:
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def has_fired():
    """Return whether the first framework has been imported, and the patches activated."""
    import sys

    return any(isinstance(finder, _Trigger) and not finder._roots for finder in sys.meta_path)


def activate() -> None:
    """Activate what the variable names; without strict mode a failure costs one line on stderr."""

    def import_and_call() -> None:
        from megatron_rl_patches.activation import activate_from_environment

        activate_from_environment()

    unless_strict_never_raise(import_and_call)


def unless_strict_never_raise(activate):
    """Call it; what it raises costs one line on stderr, with MEGATRON_RL_PATCHES_STRICT it is raised."""
    try:
        activate()
    except Exception as error:
        if not is_strict():
            _complain(error)
        elif isinstance(error, ImportError):  # which frameworks swallow where they make each other optional
            raise RuntimeError(f"megatron_rl_patches could not be activated: {error}") from error
        else:
            raise


def is_strict(environ=None):
    """Return whether `MEGATRON_RL_PATCHES_STRICT` is on."""
    import os

    return (environ or os.environ).get("MEGATRON_RL_PATCHES_STRICT", "").strip().lower() in _ON


def _value(variable: str) -> str:
    import os

    return os.environ.get(variable, "").strip().lower()


def _roots() -> frozenset[str]:
    import os

    targets = os.environ.get("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", "").split(",")
    targets += os.environ.get("MEGATRON_RL_PATCHES_ROOTS", "").split(",")
    extra = (target.partition(":")[0].partition(".")[0].strip() for target in targets)
    # Not the package itself (the demo's train function is in it): activating imports it.
    return frozenset(_ROOTS).union(filter(None, extra)) - {"megatron_rl_patches"}


def _complain(error: Exception) -> None:
    import sys
    from contextlib import suppress

    reason = " ".join(f"{type(error).__name__}: {error}".split())
    with suppress(Exception):  # there is no stderr, or it is closed
        sys.stderr.write(
            f"megatron_rl_patches: not activated, going on without: {reason} "
            "(MEGATRON_RL_PATCHES_STRICT=1 makes this an error)\n"
        )
