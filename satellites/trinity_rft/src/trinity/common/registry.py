"""Trinity-RFT's registries: what they register is registered as a plugin of Trinity."""

from collections.abc import Callable, Collection
from typing import Any

from trinity.plugins import PluginError


class Registry:
    """Classes by name. `add(name, kind)` registers one with Trinity; `taken` are the names of built-in ones."""

    def __init__(self, name: str, add: Callable[[str, Any], None], taken: Callable[[], Collection[str]]) -> None:
        self.name = name
        self.modules: dict[str, Any] = {}
        self._add, self._taken = add, taken

    def get(self, module_name: str) -> Any:
        """The class of that name that a plugin registered; None without one."""
        return self.modules.get(module_name)

    def register_module(
        self, module_name: str | None = None, module_cls: Any = None, force: bool = False, lazy: bool = False
    ) -> Any:
        """Registers a class, as a decorator or by `module_cls`, by a name or the class's name. `lazy` has no effect.

        Raises PluginError for a name that is taken, also with `force`: a name has one meaning.
        """
        if module_cls is not None:
            return self._register(module_name or module_cls.__name__, module_cls)
        return lambda kind: self._register(module_name or kind.__name__, kind)

    def _register(self, name: str, kind: Any) -> Any:
        if name in self._taken():
            raise PluginError(f"{name!r} of {self.name} is built in; choose another name")
        self._add(name, kind)
        self.modules[name] = kind
        return kind
