"""Parts that the YAML chooses by name, each declared once, at its function, with arguments, traits and source.

    @policy_loss("importance_sampling", source="arXiv:1707.06347, eq. 6", traits=["ratio"])
    def importance_sampling(x, share, *, cap: PositiveFloat = 20.0):
        \"\"\"-A min(r, cap).\"\"\"

Arguments are the keyword-only parameters; annotations bound their values, and a parameter without one takes values
like its default. The formula is the first sentence of the docstring. Tables of the built-in declarations are in
builtin.json, which `make docs` writes and a test compares: `trinity check` knows them without torch.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, TypeVar

from trinity.plugins.arguments import AGGREGATIONS, Argument, PluginError, arguments_of, check_name

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """A function or class that the YAML names.

    traits: the words that its registry explains. alias_of: the name that this one stands for. keep, peers: a policy
    loss's functions of the whole batch (see trainer.algorithms.whole_batch). function: None where the module that has
    it is not imported, as in `trinity check`.
    """

    name: str
    args: dict[str, Argument] = field(default_factory=dict)
    formula: str = ""
    source: str = ""
    traits: tuple[str, ...] = ()
    alias_of: str = ""
    module: str = ""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    keep: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    peers: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: argument.default for name, argument in self.args.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            raise RuntimeError(f"{self.module}, which declares {self.name!r}, is not imported")
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Algorithm:
    """The parts an algorithm_type chooses, by their names. `offline`: learns from a dataset, without explorers.

    `args`: values for a part that differ from the part's defaults, by the key of the YAML. `repeat_times`: the usual
    number of rollouts per task, used where the YAML has none. `critic`: the algorithm learns a value model too.
    `note`: a remark for its users; `operators`: entries of the experience pipeline in its example.
    """

    name: str
    policy_loss: str
    advantage: str | None = None
    kl_loss: str = "none"
    kl_penalty: str = "none"
    entropy_loss: str = "none"
    offline: bool = False
    critic: bool = False
    sample_strategy: str = "default"
    repeat_times: int = 2
    loss_aggregation: str = "token-mean"
    args: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""
    operators: tuple[dict[str, Any], ...] = ()
    module: str = ""


D = TypeVar("D", Declaration, Algorithm)


class Registry(dict[str, D]):
    """Declarations by name. `what`: of which kind; `inputs`: the parameters that are no arguments of the YAML;
    `traits`: known ones, and what each means; `args`: of all.
    """

    def __init__(
        self,
        what: str,
        inputs: str = "",
        traits: dict[str, str] | None = None,
        args: dict[str, Argument] | None = None,
    ) -> None:
        super().__init__()
        self.what, self.inputs, self.traits, self.args = what, inputs, traits or {}, args or {}
        self.declared: list[str] = []  # in this process, of built-in ones

    def add(self, new: D) -> None:
        """Registers one meaning for a name. Raises PluginError for a name that has another."""
        known = self.get(new.name)
        functions = [getattr(one, "function", None) for one in (known, new)]
        places = {place_of(function) for function in functions if function is not None}
        if known is not None and (known.module != new.module or len(places) > 1):
            of = f"is the name of a built-in {self.what}; choose another"
            by = f"is a {self.what} of {known.module} already; choose another name"
            raise PluginError(f"{new.name!r} {of if _is_builtin(known.module) else by}")
        self[new.name] = new
        if _is_builtin(new.module) and new.name not in self.declared:
            self.declared.append(new.name)

    def declare(
        self: "Registry[Declaration]",
        name: str,
        function: Callable[..., Any],
        *,
        also: Sequence[str] = (),
        source: str = "",
        traits: Sequence[str] = (),
        args: dict[str, Argument] | None = None,
        **of_batch: Any,
    ) -> None:
        """Registers a function or class. also: other names; args: arguments in addition to the signature's."""
        if unknown := [trait for trait in traits if trait not in self.traits]:
            raise PluginError(f"{name!r} has the unknown trait {unknown[0]!r}; known: {', '.join(self.traits)}")
        given = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(given) != len(self.inputs.split(", ")):
            wanted = f"({self.inputs}, *, arguments with defaults)"
            raise PluginError(f"the {self.what} {name!r} has to take {wanted}; it takes {len(given)} before the *")
        made = Declaration(
            name=name,
            args={**arguments_of(function), **self.args, **(args or {})},
            formula=_first_sentence(function),
            source=source,
            traits=tuple(traits),
            module=function.__module__,
            function=function,
            **of_batch,
        )
        self.add(made)
        for other in also:
            self.add(replace(made, name=other, alias_of=name))


def place_of(what: Any) -> tuple[str, str, int]:
    """Returns module, name and line of a function or class: two of one name in a file differ by the line."""
    code = getattr(getattr(what, "__init__", what) if isinstance(what, type) else what, "__code__", None)
    module, name = getattr(what, "__module__", ""), getattr(what, "__qualname__", repr(what))
    return module, name, getattr(code, "co_firstlineno", 0)


def _first_sentence(function: Callable[..., Any]) -> str:
    """Returns the first sentence of the function's docstring in one line, without the full stop."""
    paragraph = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    return re.split(r"\.(?:\s|$)", " ".join(paragraph.split()), maxsplit=1)[0]


def _is_builtin(module: str) -> bool:
    return module.startswith("trinity.")


_KL_ARGS = {
    "kl_coef": Argument(0.001, "number", low=0),
    "adaptive": Argument(False, "boolean"),
    "target_kl": Argument(None, "number", optional=True, low=0),
    "horizon": Argument(None, "number", optional=True, low=0),
}
POLICY_LOSSES: Registry[Declaration] = Registry(
    "policy loss",
    "x, share",
    {
        "ratio": "has the ratio to the policy that sampled",
        "sequences": "has one value for a sequence",
        "geometric": "weighs a sequence by the geometric mean of its tokens' weights",
        "pairs": "compares the two of a preference pair",
        "keep": "leaves tokens out by statistics of the whole batch",
        "peers": "compares the sequences of a group",
        "reference": "needs log-probabilities of the base model",
        "teacher_top": "reads a teacher's top_k likeliest tokens in each place, and no reward",
        "experts": "trains rows of a dataset among rolled-out sequences",
        "mean": "is one number for a micro-batch, whose tokens no correction can weigh",
    },
)
ADVANTAGES: Registry[Declaration] = Registry(
    "advantage function",
    "rollouts",
    {
        "teacher": "reads a teacher's log-probabilities, and no reward",
        "greedy": "one rollout of each task is sampled at temperature 0, as the baseline",
        "critic": "reads a critic's values",
    },
)
KL_FUNCTIONS: Registry[Declaration] = Registry("KL function", "lp, ref, old", args=_KL_ARGS)
ENTROPY_LOSSES: Registry[Declaration] = Registry(
    "entropy loss", "x, share", args={"entropy_coef": Argument(0.0, "number")}
)
SAMPLE_STRATEGIES: Registry[Declaration] = Registry(
    "sample strategy",
    "group",
    {"arrival": "takes groups in the order they are stored, in place of the order of tasks"},
)
SELECTORS: Registry[Declaration] = Registry(
    "selector",
    "rows, seed, features",
    {"features": "reads the columns in feature_keys", "rewards": "learns from the rewards of stored groups"},
)
ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
REGISTRIES: dict[str, Registry[Any]] = {
    "policy_losses": POLICY_LOSSES,
    "advantages": ADVANTAGES,
    "kl_functions": KL_FUNCTIONS,
    "entropy_losses": ENTROPY_LOSSES,
    "sample_strategies": SAMPLE_STRATEGIES,
    "selectors": SELECTORS,
    "algorithms": ALGORITHMS,
}
for _registry in (KL_FUNCTIONS, ENTROPY_LOSSES):
    _registry["none"] = Declaration("none", formula="no term", module="trinity.plugins")


def policy_loss(
    name: str,
    *,
    also: Sequence[str] = (),
    source: str = "",
    traits: Sequence[str] = (),
    aggregation: str | None = None,
    aggregations: Sequence[str] = AGGREGATIONS,
    keep: Callable[..., Any] | None = None,
    peers: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """Register a function of (inputs, share, **args) that returns loss and report, as in trainer.algorithms.

    aggregation: its own, where algorithm.loss_agg_mode is null; aggregations: those it may have.
    """
    check_name(name)

    def register(function: _Function) -> _Function:
        own = {"loss_agg_mode": Argument(aggregation, "string", aggregation is None, tuple(aggregations))}
        words = [*traits, *(["keep"] if keep else []), *(["peers"] if peers and "pairs" not in traits else [])]
        args = {} if "pairs" in traits else own
        POLICY_LOSSES.declare(name, function, also=also, source=source, traits=words, args=args, keep=keep, peers=peers)
        return function

    return register


def _decorator(registry: Registry[Declaration], text: str) -> Callable[..., Callable[[_Function], _Function]]:
    def declare(
        name: str, *, also: Sequence[str] = (), source: str = "", traits: Sequence[str] = ()
    ) -> Callable[[_Function], _Function]:
        check_name(name)

        def register(function: _Function) -> _Function:
            registry.declare(name, function, also=also, source=source, traits=traits)
            return function

        return register

    declare.__doc__ = text
    return declare


advantage = _decorator(ADVANTAGES, "Register a function of (rollouts, **args) that returns Advantages.")
kl_function = _decorator(KL_FUNCTIONS, "Register a function of log-probabilities (lp, ref, old): KL at each token.")
entropy_loss = _decorator(ENTROPY_LOSSES, "Register a function of (inputs, share): the mean entropy, a scalar.")
sample_strategy = _decorator(SAMPLE_STRATEGIES, "Register a function of (group, **args): whether it may be trained.")
selector = _decorator(SELECTORS, "Register a class of (rows, seed, features, **args) with select(position).")


def algorithm(name: str, *, also: Sequence[str] = (), **parts: Any) -> None:
    """Register an algorithm_type; `parts` are the fields of Algorithm."""
    module = sys._getframe(1).f_globals["__name__"]  # inspect.stack() searches all modules, for each frame
    known = {one.name for one in fields(Algorithm)} - {"name", "module"}
    if unknown := [key for key in parts if key not in known]:
        raise PluginError(f"algorithm {name!r} has no {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if "policy_loss" not in parts:
        raise PluginError(f"algorithm {name!r} has no policy_loss; give its name")
    ALGORITHMS.add(Algorithm(name=name, module=module, **parts))
    for other in also:
        ALGORITHMS.add(Algorithm(name=other, module=module, **{**parts, "note": f"another name of `{name}`"}))


def import_modules(package: str) -> None:
    """Import every module of a package, so that what they declare is registered."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{found.name}")


def _fill() -> None:
    """The registries from builtin.json; modules that declare replace its entries by their own."""
    text = resources.files(__package__).joinpath("builtin.json").read_text(encoding="utf-8")
    for title, rows in json.loads(text).items():
        registry = REGISTRIES[title]
        for row in sorted(rows, key=lambda row: "alias_of" in row):
            if title == "algorithms":
                made: Any = Algorithm(**{**row, "operators": tuple(row.get("operators", ()))})
            elif "alias_of" in row:
                made = replace(registry[row["alias_of"]], **row)
            else:
                args = {
                    name: Argument(**{**given, "choices": tuple(given.get("choices", ()))})
                    for name, given in row.get("args", {}).items()
                }
                made = Declaration(**{**row, "args": args, "traits": tuple(row.get("traits", ()))})
            registry[made.name] = made


_fill()
