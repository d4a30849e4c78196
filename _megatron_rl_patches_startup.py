"""The import trigger: loads megatron_rl_patches when the first framework is imported.

`megatron_rl_patches_startup.pth` calls `main()` at the start of every interpreter of the environment
in which `MEGATRON_RL_PATCHES` is set.  Most of those processes never import Megatron, so nothing is
imported here at module level, and neither wrapt nor the package itself before a framework is.

PYTEST_DONT_REWRITE: or else pytest would warn that it cannot rewrite asserts of a module that is imported.
"""

_ROOTS = ("megatron", "slime", "vime", "miles", "verl", "nemo_rl", "areal")
# What the variables, and options of patches, understand.
ON = ("1", "true", "on", "yes")
OFF = ("", "0", "false", "off", "no", "none")
#: What is logged, in the three parts of a message of :mod:`megatron_rl_patches.common.messages`.
NOT_ACTIVATED = (
    "not activated: {error}",
    "The program runs without patches.",
    "Run megatron-rl-patches doctor; MEGATRON_RL_PATCHES_STRICT=1 makes this an error.",
)
_PATIENCE_SECONDS = 60.0
_FORK_PATIENCE_SECONDS = 5.0


def main() -> None:
    """Arm the trigger if `MEGATRON_RL_PATCHES` is on; safe to call any number of times, never raises."""
    try:
        if _value("MEGATRON_RL_PATCHES") not in OFF:
            finder.arm(_roots())
    except Exception as error:
        _complain(error)


class Listener:
    """What is called at the end of imports."""

    def loaded(self, name: str) -> None:
        """A watched module has just been imported, or reloaded; an exception makes that fail."""

    def import_ended(self) -> None:
        """The import of a module that was half imported when it was watched has ended."""


class Finder:
    """Finds what the others find: activates the patches before the first framework, and calls import hooks.

    Nothing is done in `find_spec`, which runs under the global import lock: if another thread were half way
    through a module that the activation or a hook needs, the two would wait for each other. That also leaves
    those alone who only look whether a framework is installed. `_Loader` does it all.
    """

    def __init__(self) -> None:
        from _thread import RLock

        self._lock = RLock()
        self._roots: frozenset[str] | None = None
        self._activate = activate
        self._activating = False
        self._listeners: dict[str, list[Listener]] = {}
        self._half_imported: set[str] = set()
        self._executed: set[str] = set()
        self._locked_for_fork: dict[int, bool] = {}

    def arm(self, roots) -> None:
        """Activate the patches when one of these root packages is imported; does nothing the second time."""
        import os

        if self._roots is None:
            self._roots = roots
            self._install()
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(
                    before=self._before_fork,
                    after_in_parent=self._after_fork,
                    after_in_child=self._after_fork_in_child,
                )

    def _install(self) -> None:
        import sys

        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    # --- import hooks

    def watch(self, name, listener) -> None:
        """Have `listener.loaded(name)` called at the end of every import of this module, and of every reload.

        Python offers no call-back for an import that had begun before. `listener.import_ended()` is called
        in the next import of any module after that one has ended.
        """
        import sys

        self._listeners.setdefault(name, [])
        if listener not in self._listeners[name]:
            self._listeners[name].append(listener)
        self._install()
        if name in sys.modules and not self.is_imported(name):
            self._half_imported.add(name)

    def forget(self, name, listener) -> None:
        """Call the listener no longer."""
        listeners = self._listeners.get(name, [])
        if listener in listeners:
            listeners.remove(listener)

    def is_imported(self, name) -> bool:
        """Return whether the module has been executed; a module whose hooks run at this moment has."""
        import sys

        spec = getattr(sys.modules.get(name), "__spec__", None)
        return name in sys.modules and (name in self._executed or not getattr(spec, "_initializing", False))

    def executed(self, name, module) -> None:
        """Call the listeners of a module; what they raise makes the import fail."""
        import sys

        if self._listeners.get(name) and name in sys.modules:  # not one that is loaded under no name
            if sys.modules[name] is module:
                self._executed.add(name)
            try:
                for listener in tuple(self._listeners[name]):
                    listener.loaded(name)
            finally:
                self._executed.discard(name)
        self.look_for_ended_imports()

    def look_for_ended_imports(self) -> None:
        ended = [name for name in tuple(self._half_imported) if self.is_imported(name)]
        self._half_imported.difference_update(ended)
        for listener in {listener for name in ended for listener in self._listeners[name]}:
            listener.import_ended()

    # --- what Python calls

    def find_spec(self, fullname, path=None, target=None):
        import sys

        # Those whose import failed are forgotten. Walking over all of `sys.modules` would cost 0.1 ms here.
        failed = [name for name in tuple(self._half_imported) if name not in sys.modules]
        self._half_imported.difference_update(failed)
        # While a module is half imported, any other import is an occasion to look whether its own has ended.
        is_awaited = self._listeners.get(fullname) or self._half_imported
        if not is_awaited and fullname.partition(".")[0] not in (self._roots or ()):
            return None
        spec = self._ask_others(fullname, path, target)
        # Without a loader it is a namespace, as `megatron` is: the first package in it will do.
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = _Loader(spec.loader, fullname, self)
        return spec

    def _ask_others(self, fullname, path, target):
        import sys

        for other in tuple(sys.meta_path):
            find_spec = None if other is self else getattr(other, "find_spec", None)
            spec = find_spec and find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    # --- activation

    def fire(self, name) -> None:
        """Activate once, before a framework is executed. Raises, and stays armed, only in strict mode."""
        if name.partition(".")[0] not in (self._roots or ()):
            return
        # A second thread waits until the hooks are in place. Not for ever: it may hold the import lock
        # of a module that the activation needs; hooks that come late still fire.
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        lock = self._lock
        try:
            if self._roots and not self._activating:  # the activation itself may import a framework
                self._activating = True
                try:
                    self._activate()
                finally:
                    self._activating = False
                self._roots = frozenset()
        finally:
            lock.release()

    def _before_fork(self) -> None:
        from _thread import get_ident

        # The child of a fork has no other threads: what they have begun would never end there.
        self._locked_for_fork[get_ident()] = self._lock.acquire(timeout=_FORK_PATIENCE_SECONDS)

    def _after_fork(self) -> bool:
        from _thread import get_ident

        has_lock = self._locked_for_fork.pop(get_ident())
        if has_lock:
            self._lock.release()
        return has_lock

    def _after_fork_in_child(self) -> None:
        from _thread import RLock

        if not self._after_fork():
            self._lock, self._activating, self._activate = RLock(), False, _refuse_after_fork


class _Loader:
    """Fires the trigger, hands over to the real loader, then calls the import hooks."""

    def __init__(self, loader, name, finder):
        self._loader, self._name, self._finder = loader, name, finder
        self._module = None

    def create_module(self, spec):
        from sys import modules

        was_imported = self._name in modules
        self._finder.look_for_ended_imports()
        self._finder.fire(self._name)
        # The activation imported this very module: a second copy would be one that nobody patches.
        self._module = None if was_imported else modules.get(self._name)
        return self._module or self._loader.create_module(spec)

    def exec_module(self, module):
        self._leave_no_mark(module)
        if module is not self._module:
            self._loader.exec_module(module)
        self._module = None
        self._finder.executed(self._name, module)

    def _leave_no_mark(self, module) -> None:
        for owner, attribute in (module, "__loader__"), (getattr(module, "__spec__", None), "loader"):
            if getattr(owner, attribute, None) is self:
                setattr(owner, attribute, self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def has_fired():
    """Return whether the first framework has been imported, and the patches activated."""
    return finder._roots is not None and not finder._roots


def unless_strict_never_raise(function):
    """Decorate: what it raises costs one line on stderr; with MEGATRON_RL_PATCHES_STRICT it is raised."""

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            if is_interrupt(error):
                raise
            if not is_strict():
                _complain(error)
            elif isinstance(error, ImportError) or not isinstance(error, Exception):
                # Frameworks swallow the former where they make each other optional; SystemExit says nothing.
                raise RuntimeError(f"megatron_rl_patches could not be activated: {_shown(error)}") from error
            else:
                raise

    return guarded


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception ends the program from outside: Ctrl-C, or raised by a signal's handler."""
    import signal

    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return True
    handlers: list[object] = [signal.getsignal(number) for number in signal.valid_signals()]
    objects = [handler.__call__ for handler in handlers if callable(handler)]
    codes = [getattr(function, "__code__", None) for function in (*handlers, *objects)]
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code not in codes:
        entry = entry.tb_next
    return entry is not None


@unless_strict_never_raise
def activate():
    """Activate what the variable names."""
    from importlib import import_module

    # By name, as an entry point is: the engine imports this module, for its import hooks.
    import_module("megatron_rl_patches.engine.api").activate_from_environment()


@unless_strict_never_raise
def _refuse_after_fork():
    raise RuntimeError(
        "this process was forked while another thread activated the patches; import a framework, "
        "or call megatron_rl_patches.apply(), before that thread or this process starts"
    )


def is_strict():
    """Return whether `MEGATRON_RL_PATCHES_STRICT` is on."""
    return _value("MEGATRON_RL_PATCHES_STRICT") in ON


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


def _shown(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _complain(error: BaseException) -> None:
    import sys
    from contextlib import suppress

    with suppress(Exception):  # there is no stderr, or it is closed
        line = "megatron_rl_patches: {}. {} {}\n".format(*NOT_ACTIVATED)
        sys.stderr.write(line.format(error=_shown(error)))


#: Of this process; the engine registers its import hooks with it.
finder = Finder()
