"""nofm: keep N of every M. Train, measure and ship N:M sparse networks in PyTorch.

    nofm.sparsify_(model, "2:4")                            # in place, same state_dict keys
    nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)
    ...                                                     # your own training loop
    nofm.fold_(model)                                       # zeros written in, plain modules back

The public names are gathered in `_names` and loaded, with torch, when one is first asked for: the command line lives in this
package too, and prints its help before that.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._names import *  # noqa: F403
    from ._names import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module 'nofm' has no attribute {name!r}")
        if find_spec(f"nofm.{name}") is not None:  # a room, which must not wait for the names: they are gathered from it
            return import_module(f"nofm.{name}")
        names = import_module("nofm._names")
        if not hasattr(names, name):
            in_place = f"; did you mean nofm.{name}_, which works in place?" if hasattr(names, f"{name}_") else ""
            raise AttributeError(f"module 'nofm' has no attribute {name!r}{in_place}")
        return getattr(names, name)

    def __dir__() -> list[str]:
        return sorted(import_module("nofm._names").__all__)
